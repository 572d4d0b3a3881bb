"""Fields that change logits, fields that nobody knows, and a server behind a proxy, with https."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from typing import Any

import pytest
from serving_client import httpx, running, until

import kvjax
from kvjax.cli import InputError
from kvjax.serve.http import command
from kvjax.serve.http.arguments import parse
from kvjax.serve.http.fields import is_close

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SHAPING: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"logit_bias": {"65": 100.0}},
    {"min_tokens": 6, "stop_token_ids": list(range(97, 107))},
    {"temperature": 1.5, "min_p": 0.3, "seed": 4},
]


@pytest.mark.parametrize("fields", SHAPING, ids=lambda fields: next(iter(fields)))
def test_completions_and_chats_are_generates(server, tiny_folder, fields):
    model, more = kvjax.load(tiny_folder), dict(fields)
    stops = [*model.spec.eos, *more.pop("stop_token_ids", ())]
    if "logit_bias" in more:
        more["logit_bias"] = {int(id): bias for id, bias in more["logit_bias"].items()}
    prompts = {TEXT: {"prompt": "Hello"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
    for path, prompt in prompts.items():
        ids = server.ask.post("/tokenize", json=prompt).json()["tokens"]
        tokens = kvjax.generate(model, "full", [ids], max_new_tokens=12, stops=stops, **more).tokens[0]
        answer = server.ask.post(path, json={"max_tokens": 12, "temperature": 0} | prompt | fields)
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        ended = tokens[-1] in stops
        after = ids if path == TEXT else ()
        show = model.text.stream(after=after)
        text = "".join(show.step(token) for token in (tokens[:-1] if ended else tokens)) + show.finish()
        assert (choice.get("text") if path == TEXT else choice["message"]["content"]) == text
        assert usage["completion_tokens"] == len(tokens)
        assert choice["finish_reason"] == ("stop" if ended else "length")


def test_stop_strings_end_nothing_before_the_least_tokens(server):
    letter = server.ask.post("/tokenize", json={"prompt": "A", "add_special_tokens": False}).json()["tokens"]
    fields = {"logit_bias": {letter[0]: 100}, "stop": "AA", "max_tokens": 9}
    assert server.complete(**fields)["choices"][0]["text"] == ""
    assert server.complete(**fields, min_tokens=5)["choices"][0]["text"] == "AAAAA"


# --- unknown fields ------------------------------------------------------------------------------


def test_unknown_fields_are_noted_once(server):
    body = {"prompt": "Hello", "max_tokens": 2, "use_beam_search": False, "stream_options": {"verbose": 1}}
    answers = [server.ask.post(TEXT, json=body) for _ in range(2)]
    ignored = ["use_beam_search", "stream_options.verbose"]
    assert [answer.json()["usage"]["kv"]["ignored_fields"] for answer in answers] == [ignored, ignored]
    assert "ignored_fields" not in server.complete()["usage"]["kv"]
    noted = [line["field"] for line in server.lines() if line["event"] == "ignored_field"]
    assert [noted.count(field) for field in ignored] == [1, 1]
    assert server.ask.post("/tokenize", json={"prompt": "x", "return_token_strs": 1}).status_code == 200


def test_a_field_that_looks_like_ours_is_refused(server):
    status, error = server.refusal(TEXT, {"prompt": "x", "kv_polcy": "full"})
    assert status == 400
    assert error["message"] == "kv_polcy: not a field, but kv_policy is. Correct it, or leave it out."
    assert error["code"] == "unknown_field"


@pytest.mark.parametrize(
    ("name", "known", "close"),
    [
        ("max_token", "max_tokens", True),
        ("maxtoken", "max_tokens", True),
        ("tmperatura", "temperature", True),
        ("maxtokn", "max_tokens", False),
        ("max_tokens_now", "max_tokens", False),
        ("m", "n", False),
        ("stpo", "stop", True),
    ],
)
def test_two_letters_are_close(name, known, close):
    assert is_close(name, known) is close


# --- behind a proxy ------------------------------------------------------------------------------


def test_a_strict_server_below_a_path_with_other_origins(tiny_folder):
    words = ["--strict", "--root-path", "/llm", "--cors", "https://a.example; https://b.example"]
    with running(tiny_folder, *words) as server:
        status, error = server.refusal(TEXT, {"prompt": "x", "use_beam_search": False})
        assert (status, error["param"], error["code"]) == (400, "use_beam_search", "unknown_field")
        # A proxy may remove the path, or leave it.
        for path in ("/v1/models", "/llm/v1/models", "/llm/", "/llm/page/page.js", "/llm/health"):
            assert server.ask.get(path).status_code == 200, path
        assert server.ask.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert server.refusal("/llm" + TEXT, method="GET")[0] == 405
        for origin, status in (("https://a.example", 200), ("https://c.example", 403)):
            answer = server.ask.get("/v1/models", headers={"Origin": origin})
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
        wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = server.ask.options(TEXT, headers={"Origin": "https://b.example"} | wish)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://b.example"
        refused = server.ask.options(TEXT, headers={"Origin": "https://c.example"} | wish)
        assert refused.status_code == 400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A new one for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "cert.pem", folder / "key.pem"
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(["openssl", "req", "-x509", *words], check=True, capture_output=True)
    return files


@pytest.mark.slow
def test_with_a_certificate_it_speaks_https(tiny_folder, certificate):
    cert, key = map(str, certificate)
    with running(tiny_folder, "--ssl-certfile", cert, "--ssl-keyfile", key) as server:
        assert until(lambda: any(line["event"] == "listening" for line in server.lines()))
        (url,) = [line["url"] for line in server.lines() if line["event"] == "listening"]
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=60) as client:
            body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            answer = client.post(url + TEXT, json=body)
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ssl-keyfile", "key.pem"], "Add --ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "none.pem cannot be used"),
        (["--root-path", "llm"], "a path as /llm"),
        (["--cors", "a.example"], "is not an origin"),
    ],
)
def test_options_that_cannot_be_used_are_refused(words, said):
    with pytest.raises(InputError, match=said):
        command.check_certificate(parse(words))
