"""What one client may take of the server: bodies, connections, places in the queue, time, contexts."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from serving_client import Running, httpx, running, stopped, until

from kvjax.engine import Engine, Request, Ticket
from kvjax.serve.http import command, errors, middleware, service
from kvjax.serve.http.arguments import parse
from kvjax.serve.http.errors import ApiError
from kvjax.serve.http.log import Log
from kvjax.serve.http.schemas import ChatBody, CompletionBody
from kvjax.serve.http.service import Clients, SavedContexts, read_json

TEXT, CONTEXTS = "/v1/completions", "/v1/contexts"
KIND = {"Content-Type": "application/json"}
MIB = 2**20


@pytest.fixture(scope="module")
def small(tiny_folder) -> Iterator[Running]:
    """A server that takes large bodies, and few and fast ones; Ann and Bob have keys."""
    words = ["--max-body", "8MiB", "--body-timeout", "0.5", "--max-connections", "16"]
    with running(tiny_folder, *words, keys=("ann", "bob")) as server:
        server.ask.headers["Authorization"] = "Bearer ann"
        yield server


# --- bodies --------------------------------------------------------------------------------------


def slowest_health(url: str, until_done: threading.Event) -> float:
    slowest = 0.0
    with httpx.Client(timeout=120) as client:
        while not until_done.is_set():
            begun = time.monotonic()
            assert client.get(url + "/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
    return slowest


@pytest.mark.parametrize(
    ("head", "element", "tail", "words"),
    [
        (b'{"prompt":[', b"null,", b"null]}", "A list in the body has 1677"),
        (b'{"prompt":[', b"1,", b"1]}", "A list in the body has 4194"),
        (b'{"prompt":"', b"Once upon a time. ", b'"}', "The text has 8388"),
    ],
    ids=["nulls", "ids", "text"],
)
def test_a_hostile_body_stops_nobody(small, head, element, tail, words):
    body = head + element * (8 * MIB // len(element) - 20) + tail
    done = threading.Event()
    with ThreadPoolExecutor() as pool:
        slowest = pool.submit(slowest_health, small.url, done)
        try:
            status, error = small.refusal(TEXT, content=body, headers=KIND)
        finally:
            done.set()
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(words)
        assert slowest.result() < 2.5  # 5 to 100 s where it is validated as a whole, or tokenized


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": [None] * 999}, CompletionBody),
        ({"prompt": [1, *["x"] * 999]}, CompletionBody),
        ({"prompt": ["x", *[1] * 999]}, CompletionBody),
        ({"prompt": [[None] * 99] * 99}, CompletionBody),
        ({"prompt": "x", "stop": [None] * 999}, CompletionBody),
        ({"prompt": "x", "stop_token_ids": ["x"] * 999}, CompletionBody),
        ({"messages": [None] * 999}, ChatBody),
        ({"messages": [{"role": "user", "content": [None] * 999}]}, ChatBody),
    ],
)
def test_a_list_ends_at_its_first_fault(body, kind):
    with pytest.raises(ValueError, match="1 validation error"):
        kind.model_validate(body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"metadata": {"a": [' + b"1," * 100 + b"1]}}", "context_length_exceeded"),
        (b"{" + b",".join(b'"%d": 1' % number for number in range(301)) + b"}", "too_many_fields"),
        (b'{"prompt": [' + (b"[" + b"[[[]]]," * 99 + b"{}],") * 99 + b"{}]}", "too_many_objects"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b"[" * 1000 + b"]" * 1000, "invalid_json"),
    ],
)
def test_values_of_a_body_are_bounded(body, code):
    with pytest.raises(ApiError) as refused:
        read_json(body, most=100)
    assert refused.value.code == code


def test_a_body_may_be_as_large_as_the_context_needs(tiny_folder, monkeypatch):
    options = parse(["--model", str(tiny_folder)])
    server = command.open_service(options, service.Log())
    try:
        assert server.max_body == 2**18
        monkeypatch.setattr(service, "BYTES_PER_TOKEN", 1024)
        assert server.max_body == 1024 * 512
    finally:
        server.engine.close()


def test_parts_of_large_bodies_are_bounded_together_and_small_ones_pass(small, monkeypatch):
    monkeypatch.setattr(middleware, "MOST_BODIES", 0)
    status, error = small.refusal(TEXT, content=b" " * (2**16 + 1), headers=KIND)
    assert (status, error["code"]) == (503, "too_many_bodies")
    assert small.complete(max_tokens=1)


# --- connections ---------------------------------------------------------------------------------

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann\r\nContent-Length: 99\r\n\r\n{"


def connect(server: Running, sent: bytes) -> socket.socket:
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def test_a_body_that_does_not_come_is_answered_and_its_connection_closed(small):
    with connect(small, HALF) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))  # to the end
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_too_slow" in answer


def test_a_request_that_does_not_come_closes_its_connection(small):
    with connect(small, b"GET /health HT") as connection:
        assert until(lambda: closed(connection))


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_wait_make_room_for_others(small):
    waiting = [connect(small, HALF if number % 2 else b"GET ") for number in range(40)]
    try:
        for _ in range(3):
            assert httpx.get(small.url + "/health", timeout=5).status_code == 200
        assert until(lambda: sum(map(is_gone, waiting)) >= 40 - 16)
    finally:
        for connection in waiting:
            connection.close()


def test_a_connection_that_just_came_is_not_closed_for_its_elders():
    """Its request may be on its way; the elders were seen by an earlier look."""
    gone: list[str] = []

    class Open:
        cycle, client = None, ("here", 0)

        def __init__(self, name: str) -> None:
            self.transport = SimpleNamespace(abort=lambda: gone.append(name))

    elders, late = [Open("a"), Open("b")], Open("late")
    connections = command.Connections(most=1, seconds=60)
    connections.sweep(elders)
    assert gone == []
    connections.sweep([late, *elders])
    assert sorted(gone) == ["a", "b"]
    connections.sweep([late, Open("later")])
    assert sorted(gone) == ["a", "b", "late"]


def is_gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


# --- time ----------------------------------------------------------------------------------------


def too_late(engine: Engine, goes_on: threading.Event) -> None:
    """Lets the engine go on once a request with 0.05 seconds waits for it, and they are over."""

    def wait() -> None:
        until(lambda: engine.metrics(wait=False).queued > 0)
        time.sleep(0.1)
        goes_on.set()

    threading.Thread(target=wait).start()


def test_time_that_is_over_before_the_first_token_is_no_answer(small):
    body = {"prompt": "Hello", "max_time": 0.05}
    with stopped(small.service.engine) as goes_on:
        too_late(small.service.engine, goes_on)
        status, error = small.refusal(TEXT, body)
    assert (status, error["code"], error["type"]) == (408, "deadline_exceeded", "invalid_request_error")
    with stopped(small.service.engine) as goes_on:
        too_late(small.service.engine, goes_on)
        (event,) = small.stream(TEXT, body)
    assert event["error"]["code"] == "deadline_exceeded"


# --- limits of a client --------------------------------------------------------------------------


def refused(call: Any) -> str:
    with pytest.raises(ApiError) as error:
        call()
    assert error.value.status_code == 429
    assert int(error.value.headers["Retry-After"]) >= 1
    return str(error.value.code)


def test_requests_and_tokens_of_a_minute_come_back_steadily(monkeypatch):
    now = 0.0
    monkeypatch.setattr(service.time, "monotonic", lambda: now)
    clients = Clients(requests=3, tokens=100)
    for _ in range(3):
        clients.count_request("ann")
    assert refused(lambda: clients.count_request("ann")) == "too_many_requests"
    clients.count_request("bob")
    now = 20.0  # a third of a minute, a third of the requests
    clients.count_request("ann")
    assert refused(lambda: clients.count_request("ann")) == "too_many_requests"
    clients.count_tokens("bob", 300)
    now = 139.0
    assert refused(lambda: clients.count_request("bob")) == "too_many_tokens"
    now = 141.0
    clients.count_request("bob")


def test_texts_of_a_client_that_wait_are_counted_until_they_begin():
    clients = Clients(waiting=3)
    tickets = [Ticket(number, Request(prompt=[1]), 1, lambda: None) for number in range(4)]
    assert clients.submit("ann", 2, lambda: tickets[:2]) == tickets[:2]
    assert refused(lambda: clients.submit("ann", 2, lambda: tickets[2:])) == "too_many_waiting"
    assert clients.submit("bob", 3, lambda: tickets[:3])
    tickets[0]._deliver([], 1, None, 0)  # its first token
    assert clients.submit("ann", 2, lambda: tickets[2:]) == tickets[2:]
    with pytest.raises(ZeroDivisionError):
        clients.submit("carl", 3, lambda: 1 // 0)
    assert clients.submit("carl", 3, lambda: tickets[:3])


def test_only_so_many_clients_are_remembered(monkeypatch):
    monkeypatch.setattr(service, "MOST_CLIENTS", 2)
    clients = Clients(requests=1)
    for name in ("ann", "bob"):
        clients.count_request(name)
    assert refused(lambda: clients.count_request("ann")) == "too_many_requests"
    clients.count_request("carl")  # in the place of Bob, who was not seen for longest
    assert refused(lambda: clients.count_request("ann")) == "too_many_requests"
    clients.count_request("bob")


def test_a_client_that_asks_too_often_waits_and_others_do_not(small, monkeypatch):
    clients = small.service.clients
    monkeypatch.setattr(clients, "_most", {"requests": 2, "tokens": 0})
    monkeypatch.setattr(clients, "_seen", collections.OrderedDict())
    assert small.complete(max_tokens=1)
    assert small.complete(max_tokens=1)
    answer = small.ask.post(TEXT, json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
    assert 20 <= int(answer.headers["Retry-After"]) <= 30
    assert small.ask.get("/v1/models").status_code == 200
    bob = {"Authorization": "Bearer bob"}
    assert small.ask.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=bob).status_code == 200


def test_tokens_count_where_they_are_read_and_written(small, monkeypatch):
    taken: collections.Counter[str] = collections.Counter()
    monkeypatch.setattr(
        small.service.clients, "count_tokens", lambda client, many: taken.update({client: many})
    )
    small.complete("Hello", max_tokens=4, ignore_eos=True)
    assert list(taken.values()) == [6 + 4]
    taken.clear()
    twice = {"kv_policy": "kvzip(instruction=(5, 7)) + uniform(0.9)"}
    small.complete("Hello", max_tokens=4, ignore_eos=True, **twice)
    assert list(taken.values()) == [6 + 2 + 6 + 4], "the prompt is fed twice"


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ([], (0, 0, 0)),
        (["--host", "0.0.0.0"], (600, 32, 1_000_000)),
        (["--host", "0.0.0.0", "--queue", "1"], (600, 1, 1_000_000)),
        (["--host", "0.0.0.0", "--client-requests", "0", "--client-tokens", "5"], (0, 32, 5)),
        (["--client-waiting", "7"], (0, 7, 0)),
    ],
)
def test_a_machine_alone_limits_nobody(words, limits):
    clients = command.clients_of(parse(words))
    assert (clients._most["requests"], clients.most_waiting, clients._most["tokens"]) == limits


# --- contexts ------------------------------------------------------------------------------------


def test_many_contexts_stop_no_text(small):
    """Few are read at a time; the others are asked to come again, and no thread waits for them."""
    with ThreadPoolExecutor(70) as pool, stopped(small.service.engine) as goes_on:

        def create(number: int) -> int:
            body = {"name": f"c{number}", "prompt": "x" * 50}
            auth = small.ask.headers["Authorization"]
            return httpx.post(
                small.url + CONTEXTS, json=body, headers={"Authorization": auth}, timeout=60
            ).status_code

        # Fewer than connections may be open.
        answers = [pool.submit(create, number) for number in range(12)]
        assert until(lambda: sum(answer.done() for answer in answers) == 8)
        text = pool.submit(small.complete, max_tokens=1)
        assert 'kvjax_engine_up{model="tiny"} 1.0' in small.ask.get("/metrics", timeout=10).text
        assert until(lambda: small.service.engine.metrics(wait=False).queued == 5)
        goes_on.set()
        assert text.result()["choices"]
        codes = collections.Counter(answer.result() for answer in answers)
    assert codes == {201: 4, 429: 8}
    names = [context["id"] for context in small.ask.get(CONTEXTS).json()["data"]]
    assert len(names) == 4
    for name in names:
        assert small.ask.delete(f"{CONTEXTS}/{name}").status_code == 200


def left(line: dict[str, Any]) -> bool:
    return (line.get("path"), line.get("status")) == (CONTEXTS, 499)


@pytest.mark.parametrize(
    ("seconds", "limit", "status"), [(0.1, None, 408), (0.1, 20.0, 408), (20.0, 20.0, 504)]
)
def test_a_client_is_told_whose_limit_it_was(seconds, limit, status):
    """Its own max_time is a 4xx; monitors count a 5xx as a fault of the server."""
    error = errors.too_late(seconds, limit)
    assert error.status_code == status
    assert ("--request-timeout" in error.message) is (status == 504)


def test_a_client_that_leaves_has_no_context_and_one_that_is_late_is_told(small):
    body = {"name": "gone", "prompt": "x" * 50}
    with stopped(small.service.engine):
        with pytest.raises(httpx.ReadTimeout):
            small.ask.post(CONTEXTS, json=body, timeout=0.1)
        assert until(lambda: any(map(left, small.lines())))
    assert small.idle()
    assert small.refusal(f"{CONTEXTS}/gone", method="GET")[0] == 404
    with stopped(small.service.engine) as goes_on:
        too_late(small.service.engine, goes_on)
        status, error = small.refusal(CONTEXTS, body | {"max_time": 0.05})
    assert (status, error["code"]) == (408, "deadline_exceeded")
    assert small.ask.get(CONTEXTS).json()["data"] == []


def test_a_context_is_there_for_its_key_alone(small):
    bob = {"Authorization": "Bearer bob"}
    made = small.ask.post(CONTEXTS, json={"name": "secret", "prompt": "Of Ann."})
    assert made.status_code == 201
    assert small.ask.get(CONTEXTS, headers=bob).json()["data"] == []
    for path, method, body in (
        (f"{CONTEXTS}/secret", "GET", None),
        (f"{CONTEXTS}/secret", "DELETE", None),
        (TEXT, "POST", {"prompt": "x", "context": "secret"}),
        (TEXT, "POST", {"prompt": "x", "context": "other"}),
    ):
        status, error = small.refusal(path, body, method, headers=bob)
        assert (status, error["code"]) == (404, "context_not_found")
        assert "secret" not in error["message"].replace(f"no context {'secret'!r}", "")
    mine = small.ask.post(CONTEXTS, json={"name": "secret", "prompt": "Of Bob!!"}, headers=bob)
    assert (mine.status_code, mine.json()["tokens"]) == (201, 9)
    assert small.ask.get(f"{CONTEXTS}/secret").json() == made.json()
    assert small.ask.delete(f"{CONTEXTS}/secret", headers=bob).status_code == 200
    assert small.complete("?", context="secret", max_tokens=1)["usage"]["prompt_tokens"] == 8 + 1
    assert small.ask.delete(f"{CONTEXTS}/secret").status_code == 200


def test_a_file_that_cannot_be_loaded_is_reported_and_left(small, tmp_path):
    (tmp_path / "doc.kv").write_bytes(b"not a state")
    lines: list[bytes] = []
    log = Log(lines.append)
    assert SavedContexts(small.service.engine.contexts, tmp_path, log).load({}) == 0
    assert log.flush(10)
    (line,) = map(json.loads, lines)
    assert (line["event"], line["error"]) == ("context_skipped", "StateError")
    assert line["file"] == str(tmp_path / "doc.kv")
    assert (tmp_path / "doc.kv").exists()


# --- metrics -------------------------------------------------------------------------------------


def test_no_series_is_there_twice(small, monkeypatch):
    engine = small.service.engine
    small.complete(max_tokens=1)
    now = engine.metrics()
    (lane, *_) = now.batches
    lane = dataclasses.replace(lane, policy="write_gate(0.1)", weights="default@1", rows=2)
    lanes = (
        lane,
        dataclasses.replace(lane, weights="aggressive@2", rows=3),
        dataclasses.replace(lane, rows=4),
    )
    monkeypatch.setattr(engine, "metrics", lambda wait=True: dataclasses.replace(now, batches=lanes))
    text = small.ask.get("/metrics").text
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    rows = dict(
        re.findall(r'kvjax_lane_rows\{lane="write_gate\(0.1\)",model="tiny",weights="(\w+)@.*"\} (\S+)', text)
    )
    assert rows == {"default": "6.0", "aggressive": "3.0"}
