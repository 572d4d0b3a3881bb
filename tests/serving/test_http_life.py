"""A server's life: who is let in, who leaves, what is full, what breaks, and the way out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_client import Running, httpx, running, stopped, until

from kvjax.engine import Request
from kvjax.serve.http import command, streaming

TEXT = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 500, "temperature": 0, "ignore_eos": True}

# --- keys and policies ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tiny_folder) -> Iterator[Any]:
    """A server with a key, a short queue and few policies."""
    words = ["--allow-policies", "window(16); snapkv(8) + uniform(0.5)", "--queue", "2", "--max-rows", "1"]
    with running(tiny_folder, *words, "--max-lanes", "1", keys=("sesame",)) as server:
        server.ask.headers["Authorization"] = "Bearer sesame"
        yield server


@pytest.mark.parametrize("header", [None, "Bearer sesam", "Basic sesame"])
@pytest.mark.parametrize("path", [TEXT, "/v1/models", "/metrics", "/openapi.json", "/v1/kv/x", "/nowhere"])
def test_without_the_key_nothing_is_said(guarded, header, path):
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.get(guarded.url + path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_with_a_key_any_host_is_answered_and_health_needs_none(guarded):
    assert guarded.ask.get("/v1/models", headers={"Host": "my.server"}).status_code == 200
    for path in ("/health", "/livez", "/readyz"):
        assert httpx.get(guarded.url + path).status_code == httpx.head(guarded.url + path).status_code == 200
    assert httpx.get(guarded.url + "/").status_code == 200


@pytest.mark.slow
def test_strangers_ask_for_allowed_policies_at_any_budget(guarded):
    for policy in ("full", "window(16) + sinks(2)", "snapkv(8) + uniform(0.25)"):
        assert guarded.complete(kv_policy=policy, max_tokens=1)
    for policy in ("window(32)", "snapkv(16) + uniform(0.5)", "int8(8)"):
        status, error = guarded.refusal(TEXT, {"prompt": "x", "kv_policy": policy})
        assert (status, error["code"], error["type"]) == (403, "policy_not_allowed", "permission_error")
    assert guarded.ask.get("/v1/policies").json()["allowed"] == [
        "full",
        "window(16)",
        "snapkv(8) + uniform(0.5)",
    ]


def test_a_key_has_so_many_structures_compiled_a_minute(tiny_folder):
    with running(tiny_folder, "--client-structures", "1", keys=("one", "two")) as server:

        def ask(key: str, policy: str) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return server.ask.post(
                TEXT, json={"prompt": "x", "max_tokens": 1, "kv_policy": policy}, headers=headers
            )

        assert ask("one", "window(16)").status_code == 200
        refused = ask("one", "window(24)")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_structures")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask("one", "full").status_code == 200  # it runs already
        assert ask("two", "window(24)").status_code == 200


# --- who leaves, what is full --------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back(guarded):
    answers: list[Any] = []

    def ask() -> None:
        answers.append(guarded.ask.post(TEXT, json=LONG | {"max_time": 20}))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert codes[-1] == 429
    full = next(answer for answer in answers if answer.status_code == 429)
    assert int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["code"] == "queue_full"
    assert full.json()["error"]["type"] == "rate_limit_error"


def test_of_many_texts_all_are_taken_or_none(guarded):
    with stopped(guarded.service.engine):
        ticket = guarded.service.engine.submit(Request(prompt=[1], max_new_tokens=1))
        assert guarded.refusal(TEXT, LONG | {"n": 2})[1]["code"] == "queue_full"
        assert guarded.service.engine.metrics(wait=False).queued == 1, "a refused text waits"
    assert len(ticket.result()) == 1


def test_more_texts_than_may_ever_wait_are_the_requests_fault(guarded):
    """A 429 would have the client ask again for ever."""
    status, error = guarded.refusal(TEXT, LONG | {"n": 3})
    assert (status, error["param"]) == (400, "n")
    assert "more than the 2 texts allowed (--queue)" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server, stream):
    client = httpx.Client(base_url=server.url, timeout=60)
    if stream:
        with client.stream("POST", TEXT, json=LONG | {"stream": True}) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(TEXT, json=LONG, timeout=0.05)
    client.close()
    begun = time.monotonic()
    assert until(lambda: server.service.engine.metrics().running == 0)
    assert time.monotonic() - begun < 3
    assert until(lambda: any(x.get("ends") == ["left"] for x in server.lines()))
    assert server.service.engine.metrics().completion_tokens < 2000


def test_a_client_that_leaves_the_queue_is_forgotten(guarded):
    before = guarded.service.engine.metrics().completion_tokens
    first = httpx.Client(base_url=guarded.url, headers=guarded.ask.headers)
    with first, first.stream("POST", TEXT, json=LONG | {"stream": True}):
        with pytest.raises(httpx.ReadTimeout):
            guarded.ask.post(TEXT, json=LONG, timeout=0.05)
        assert until(lambda: guarded.service.engine.metrics().queued == 0)
    assert guarded.idle()
    assert guarded.service.engine.metrics().completion_tokens - before <= 500


# --- what breaks ---------------------------------------------------------------------------------


def test_a_fault_in_one_request_ends_that_request_alone(server, monkeypatch):
    service, real = server.service, server.service.engine.submit_all

    def broken(requests: Any) -> Any:
        if requests[0].seed == 13:
            raise ZeroDivisionError("secret of the inside")
        return real(requests)

    monkeypatch.setattr(service.engine, "submit_all", broken)
    status, error = server.refusal(TEXT, {"prompt": "x", "seed": 13})
    assert (status, error["type"], error["code"]) == (500, "server_error", "fault")
    assert "secret" not in error["message"]
    fault = next(line for line in server.lines() if line["event"] == "fault")
    assert fault["error"] == "ZeroDivisionError"
    assert any("broken" in frame for frame in fault["frames"])
    assert server.complete()["choices"][0]["text"]


def test_a_fault_of_the_engine_turns_health_and_ends_the_server(tiny_folder):
    with running(tiny_folder) as server:
        stream = server.stream(TEXT, LONG)
        next(stream)

        def fault() -> None:
            raise MemoryError("the device is gone")

        server.service.engine._inbox.put(fault)  # what the engine's thread does next
        *_, last = stream
        assert last["error"]["code"] == "engine_dead"
        status, error = server.refusal("/health", method="GET")
        assert (status, error["code"]) == (503, "engine_dead")
        assert server.refusal(TEXT, {"prompt": "x"})[0] == 503
        assert 'kvjax_engine_up{model="tiny"} 0.0' in server.ask.get("/metrics").text
        server.thread.join(10)
        assert server.code == 1
        line = next(line for line in server.lines() if line["event"] == "engine_fault")
        assert (line["error"], line["message"]) == ("MemoryError", "the device is gone")


# --- held contexts -------------------------------------------------------------------------------

DOCUMENT = "A long document that is read once, and asked about as often as one likes. " * 2


def test_a_context_is_read_once_and_continued_as_if_it_stood_there(server):
    whole = server.complete(DOCUMENT + "First?", max_tokens=8)
    made = server.ask.post("/v1/contexts", json={"name": "doc", "prompt": DOCUMENT})
    assert made.status_code == 201
    assert (made.json()["tokens"], made.json()["kv_policy"]) == (len(DOCUMENT) + 1, "full")
    assert made.json()["bytes_live"] > 0
    for _ in range(2):  # the context stays
        got = server.complete("First?", context="doc", max_tokens=8)
        assert got["choices"][0]["text"] == whole["choices"][0]["text"]
        assert got["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(DOCUMENT)
    body = {
        "messages": [{"role": "user", "content": "First?"}],
        "context": "doc",
        "max_tokens": 8,
        "temperature": 0,
    }
    chat = server.ask.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert [x["id"] for x in server.ask.get("/v1/contexts").json()["data"]] == ["doc"]
    assert server.ask.get("/v1/contexts/doc").json() == made.json()

    status, error = server.refusal("/v1/contexts", {"name": "doc", "prompt": "x"})
    assert (status, error["code"], error["param"]) == (409, "context_exists", "name")
    status, error = server.refusal(TEXT, {"prompt": "x", "context": "doc", "kv_policy": "window(16)"})
    assert (status, error["code"]) == (400, "context_mismatch")
    status, error = server.refusal(TEXT, {"prompt": "x", "context": "doc", "max_tokens": 400})
    assert (status, error["code"]) == (400, "context_length_exceeded")

    assert server.ask.delete("/v1/contexts/doc").json() == {"id": "doc", "object": "context", "deleted": True}
    assert server.refusal(TEXT, {"prompt": "x", "context": "doc"})[1]["code"] == "context_not_found"
    assert server.ask.get("/v1/contexts").json()["data"] == []


# --- the process ---------------------------------------------------------------------------------


@contextmanager
def process(folder: Path, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command as one types it, and its address."""
    command = [sys.executable, "-m", "kvjax.serve", "http", "--model", str(folder), "--port", "0", *words]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **environment}, text=True)
    assert child.stderr is not None
    try:
        url = ""
        for line in child.stderr:
            event = json.loads(line) if line.startswith("{") else {}  # XLA says lines of its own
            url = url or event.get("url", "")
            if event.get("event") == "ready":
                break
        yield child, url
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


def streamed(url: str, **fields: Any) -> Any:
    """A long stream, begun."""
    return httpx.stream("POST", url + TEXT, json=LONG | {"stream": True} | fields, timeout=60)


@pytest.mark.slow
def test_sigterm_lets_what_runs_end_and_takes_nothing_new(tiny_folder):
    with process(tiny_folder, "--drain", "600") as (child, url):
        with streamed(url, n=8) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            assert until(lambda: httpx.get(url + "/health").status_code == 503)
            late = httpx.post(url + TEXT, json={"prompt": "x"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        ends = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert ends.count("length") == 8
        assert child.wait(20) == 0


@pytest.mark.slow
def test_what_does_not_end_in_time_is_ended(tiny_folder):
    with process(tiny_folder, "--drain", "0.2") as (child, url):
        with streamed(url, n=8) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "cancelled"
        assert child.wait(20) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tiny_folder):
    with process(tiny_folder) as (child, url), streamed(url, n=8) as answer:
        next(answer.iter_lines())
        child.send_signal(signal.SIGINT)
        assert until(lambda: httpx.get(url + "/health").status_code == 503)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130


@pytest.mark.slow
def test_contexts_outlive_a_process_that_is_killed(tiny_folder, tmp_path):
    words = ["--save-contexts", str(tmp_path / "kept")]

    def answer(url: str) -> str:
        body = {"prompt": "First?", "context": "doc", "max_tokens": 8, "temperature": 0}
        return httpx.post(url + TEXT, json=body, timeout=300).json()["choices"][0]["text"]

    with process(tiny_folder, *words) as (child, url):
        for name in ("doc", "other"):
            made = httpx.post(url + "/v1/contexts", json={"name": name, "prompt": DOCUMENT}, timeout=300)
            assert made.status_code == 201
        httpx.delete(url + "/v1/contexts/other", timeout=300)
        before = answer(url)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with process(tiny_folder, *words) as (child, url):
        assert [x["id"] for x in httpx.get(url + "/v1/contexts").json()["data"]] == ["doc"]
        assert answer(url) == before
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["doc.kv"]


def test_answers_are_not_delayed():
    """Asyncio sets TCP_NODELAY on connections of a socket that is declared as TCP, and on no other."""
    with command.listening_socket("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


# --- warm, and kept alive ------------------------------------------------------------------------


def test_ready_means_warm(tiny_folder):
    """What --warm-up names is compiled when the server is ready, for prompts of any width."""
    policy = "window(16)"
    with running(tiny_folder, "--warm-up", policy, "--chunk", "32") as server:
        ready = [line for line in server.lines() if line["event"] == "ready"]
        assert len(ready) == 1
        made = len(compiled(server))
        for words in (5, 31, 90):
            assert server.complete("x" * words, kv_policy=policy, max_tokens=3)
        assert len(compiled(server)) == made
        assert httpx.get(server.url + "/readyz").status_code == 200
        server.service.warm = False
        assert httpx.get(server.url + "/readyz").status_code == 503
        server.service.warm = True


def compiled(server: Running) -> list[Any]:
    """Names of the programs that the engine holds for reading prompts."""
    memory = server.service.engine._scheduler.memory
    return [key for structure in memory.structures for key in (*structure.chunk.made, *structure.make.made)]


def test_an_idle_stream_is_kept_open(tiny_folder, monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE", 0.2)
    with running(tiny_folder) as server, stopped(server.service.engine) as goes_on:
        with server.ask.stream("POST", TEXT, json={"prompt": "x", "max_tokens": 3, "stream": True}) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line)
            goes_on.set()
            rest = [line for line in lines if line and not line.startswith(":")]
        assert first.startswith(":")
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
