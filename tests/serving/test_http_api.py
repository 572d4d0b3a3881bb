"""OpenAI's protocol over a real socket: what it answers is what the library computes."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("fastapi", reason="pip install 'kvjax[serve]'")

from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from serving_client import FULL, generated, stopped, until

import kvjax
from kvjax import catalogue

# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FULL)
def test_a_completion_is_what_the_library_generates(server, tiny_folder, policy):
    prompt = "The quick brown fox jumps over the lazy dog."
    got = server.complete(prompt, kv_policy=policy, max_tokens=12)
    text, tokens, run = generated(tiny_folder, policy, prompt, 12)
    Completion.model_validate(got)
    assert got["choices"][0]["text"] == text
    assert got["usage"]["completion_tokens"] == len(tokens)
    assert got["usage"]["prompt_tokens"] == len(prompt) + 1
    kv = got["usage"]["kv"]
    assert kvjax.policy(kv["policy"]) == kvjax.policy(policy)
    assert kv["tokens_seen"] == len(prompt) + 1 + len(tokens) - 1
    assert kv["bytes_full"] == kv["tokens_seen"] * 2 * 2 * 2 * 8 * 4


def test_all_forms_of_a_prompt_read_the_same(server, tiny_folder):
    ids = kvjax.load(tiny_folder).text.encode("Hello")
    texts = [
        [choice["text"] for choice in server.complete(prompt)["choices"]]
        for prompt in ("Hello", ["Hello"], ids, [ids], ["Hello", "Hello"], [ids, ids])
    ]
    assert len({text for choices in texts for text in choices}) == 1
    assert [len(choices) for choices in texts] == [1, 1, 1, 1, 2, 2]


def test_prompts_times_n_choices_in_order(server):
    got = server.complete(["Hello", "World"], n=2, temperature=1.5, seed=7)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in got["choices"]]
    alone = [server.complete(p, n=2, temperature=1.5, seed=7)["choices"] for p in ("Hello", "World")]
    assert texts == [choice["text"] for choices in alone for choice in choices]
    assert len(set(texts)) > 2, "draws of one seed are all alike"
    assert got["usage"]["prompt_tokens"] == 2 * 6


def test_a_seed_repeats_an_answer(server):
    def drawn(**seed):
        return server.complete(temperature=2, max_tokens=12, **seed)["choices"][0]["text"]

    assert drawn(seed=5) == drawn(seed=5)
    assert len({drawn(seed=seed) for seed in (1, 2, -3)} | {drawn()}) > 1


def test_a_stream_says_what_an_answer_says(server):
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 1, "seed": 3, "n": 2, "logprobs": 1}
    whole = server.ask.post("/v1/completions", json=body).json()
    chunks = list(server.stream("/v1/completions", body))
    for index, choice in enumerate(whole["choices"]):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in choices) == choice["text"]
        assert [t for c in choices for t in c["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert [t for c in choices for t in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        assert [c["finish_reason"] for c in choices][-1] == choice["finish_reason"]
        assert not any(c["finish_reason"] for c in choices[:-1])
    assert len({c["id"] for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_usage_comes_last_in_a_stream_or_with_every_chunk(server):
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    *chunks, last = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    CompletionUsage.model_validate(last["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.stream("/v1/completions", body | {"stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a_stop_string_ends_the_text_before_it(server):
    whole = server.complete(max_tokens=12)["choices"][0]["text"]
    stop = whole[4:7]
    at = whole.index(stop)
    got = server.complete(max_tokens=12, stop=["never in it", stop])
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:at], "stop", stop)
    assert got["usage"]["completion_tokens"] < 12
    chunks = server.stream(
        "/v1/completions", {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "stop": stop}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:at]
    assert server.idle()


def test_token_ids_end_a_text_too(server, tiny_folder):
    _, tokens, _ = generated(tiny_folder, "full", "Hello", 12)
    at = max(tokens.index(token) for token in tokens)
    choice = server.complete(max_tokens=12, stop_token_ids=[tokens[at]], logprobs=0)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == at + 1
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[at])


def test_echo_with_logprobs_is_what_lm_eval_reads(server, tiny_folder):
    """A prompt's own log-probabilities: those of a text are the same whether it was written or is echoed."""
    model = kvjax.load(tiny_folder)
    ids = model.text.encode("Hello")
    written = server.complete("Hello", max_tokens=5, logprobs=2)["choices"][0]
    text = [*ids, *generated(tiny_folder, "full", "Hello", 5)[1]]
    got = server.complete(text, max_tokens=1, echo=True, logprobs=2)["choices"][0]
    echoed, generated_logprobs = got["logprobs"], written["logprobs"]
    assert got["text"].startswith(model.text.decode(text).rstrip("\ufffd"))
    assert echoed["token_logprobs"][0] is None
    assert echoed["top_logprobs"][0] is None
    assert echoed["token_logprobs"][6:-1] == pytest.approx(generated_logprobs["token_logprobs"], abs=1e-4)
    assert echoed["tokens"][6:-1] == generated_logprobs["tokens"]
    assert len(echoed["tokens"]) == 6 + 5 + 1
    assert all(
        max(top.values()) == top[token]
        for top, token in zip(generated_logprobs["top_logprobs"], generated_logprobs["tokens"])
    )


def test_echo_may_write_nothing_more(server):
    got = server.complete("Hello", max_tokens=0, echo=True, logprobs=0)
    assert got["choices"][0]["text"] == "Hello"
    assert got["choices"][0]["logprobs"]["top_logprobs"] is None
    assert len(got["choices"][0]["logprobs"]["tokens"]) == 6
    assert got["usage"]["completion_tokens"] == 0


def test_the_time_given_ends_an_answer(server):
    body = {"prompt": "Hello", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    answers = (server.ask.post(TEXT, json=body | {"max_time": 0.02 * 2**at}) for at in range(6))
    answer = next(answer for answer in answers if answer.status_code == 200)  # it had time for a token
    choice = answer.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 0 < answer.json()["usage"]["completion_tokens"] < 500
    assert server.idle()


# --- chats ---------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_a_chat_is_what_the_library_generates(server, tiny_folder):
    body = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    got = ChatCompletion.model_validate(server.ask.post("/v1/chat/completions", json=body).json())
    text, _, _ = generated(tiny_folder, "full", "Be brief.\nHello", 8)
    # A turn is a text of its own; the tiny tokenizer's are alike.
    assert got.choices[0].message.content == text
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "length"


def test_a_chat_streams_and_names_its_tokens(server):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = server.ask.post("/v1/chat/completions", json=body).json()["choices"][0]
    chunks = [ChatCompletionChunk.model_validate(c) for c in server.stream("/v1/chat/completions", body)]
    first, *others = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(c.delta.content or "" for c in others) == whole["message"]["content"]
    content = whole["logprobs"]["content"]
    assert len(content) == 8
    assert all(len(token["top_logprobs"]) == 3 for token in content)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content), "not greedy"
    assert bytes(byte for token in content for byte in token["bytes"]).decode(errors="replace")


def test_parts_and_an_answer_sent_back_are_read(server):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
    got = ChatCompletion.model_validate(server.ask.post("/v1/chat/completions", json=body).json())
    plain = body | {"messages": [{"role": "user", "content": "Hello"}]}
    same = server.ask.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
    assert got.choices[0].message.content == same
    back = [*plain["messages"], got.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    assert server.ask.post("/v1/chat/completions", json=body | {"messages": back}).status_code == 200


def test_a_chat_without_a_number_may_fill_the_context(server):
    body = {"messages": [{"role": "user", "content": "x" * 490}], "temperature": 0, "ignore_eos": True}
    got = server.ask.post("/v1/chat/completions", json=body).json()
    assert got["usage"]["total_tokens"] == 512
    assert got["choices"][0]["finish_reason"] == "length"


# --- around it -----------------------------------------------------------------------------------


def test_the_model_is_named(server):
    models = server.ask.get("/v1/models").json()
    assert [Model.model_validate(m).id for m in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 512
    assert models["data"][0]["chat_template"] is False
    assert server.ask.get("/v1/models/tiny").json() == models["data"][0]
    status, error = server.refusal("/v1/completions", {"prompt": "x", "model": "gpt-4"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert server.refusal("/v1/models/gpt-4", method="GET")[0] == 404


def test_text_to_tokens_and_back(server, tiny_folder):
    text = "Hallo, Wörld …"
    ids = kvjax.load(tiny_folder).text.encode(text)
    got = server.ask.post("/tokenize", json={"prompt": text}).json()
    assert got == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert (
        server.ask.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        == ids[1:]
    )
    assert server.ask.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    chat = server.ask.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == kvjax.load(tiny_folder).text.encode("Be brief.\nHello")


def test_health_and_version(server):
    for path in ("/health", "/livez", "/readyz"):
        assert server.ask.get(path).json() == {"status": "ok"}
    assert server.ask.get("/version").json()["version"] == kvjax.__version__


def test_metrics_count_what_was_done(server):
    def counted(name: str) -> float:
        text = server.ask.get("/metrics").text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert match, f"{name} is not in:\n{text}"
        return float(match[1])

    before = counted('kvjax_generation_tokens_total{model="tiny"}')
    server.complete(max_tokens=9, ignore_eos=True)
    assert server.idle()
    assert counted('kvjax_generation_tokens_total{model="tiny"}') == before + 9
    assert counted('kvjax_engine_up{model="tiny"}') == 1
    assert counted('kvjax_num_requests_running{model="tiny"}') == 0
    assert counted('kvjax_requests_total{model="tiny",reason="length"}') > 0
    text = server.ask.get("/metrics").text
    times = (
        "time_to_first_token",
        "inter_token_latency",
        "pause",
        "request_queue_time",
        "e2e_request_latency",
    )
    for name in (
        *(f"{name}_seconds" for name in times),
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert f'kvjax_{name}_bucket{{le="+Inf",model="tiny"}}' in text


def test_metrics_have_the_model_statuses_and_lengths(server):
    def count(name: str, **labels: str) -> float:
        labels = {"model": "tiny"} | labels
        words = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        match = re.search(
            rf"^{re.escape(f'kvjax_{name}{{{words}}}')} (\S+)$", server.ask.get("/metrics").text, re.M
        )
        return float(match[1]) if match else 0.0

    assert all('model="tiny"' in x for x in server.ask.get("/metrics").text.splitlines() if x[0] != "#")
    route = {"method": "POST", "route": TEXT}
    before = [count("http_responses_total", **route, status=status) for status in ("200", "422")]
    lengths = [count("request_generation_tokens_bucket", le=bound) for bound in ("10.0", "20.0", "+Inf")]
    server.complete(max_tokens=11, ignore_eos=True)
    server.refusal(TEXT, {"prompt": 5})
    assert until(lambda: count("request_generation_tokens_count") == lengths[2] + 1)
    after = [count("http_responses_total", **route, status=status) for status in ("200", "422")]
    assert after == [number + 1 for number in before]
    more = [count("request_generation_tokens_bucket", le=bound) for bound in ("10.0", "20.0", "+Inf")]
    assert more == [lengths[0], lengths[1] + 1, lengths[2] + 1]
    assert count("request_queue_time_seconds_count") == count("e2e_request_latency_seconds_count") > 0
    server.ask.get("/nowhere/1"), server.ask.request("BREW", "/nowhere/2")
    assert count("http_responses_total", method="GET", route="other", status="404") > 0
    assert count("http_responses_total", method="other", route="other", status="404") > 0


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/v1/models", "/metrics", "/"])
def test_head_is_get_without_a_body(server, path):
    got, head = server.ask.get(path), server.ask.head(path)
    assert (head.status_code, head.content, head.headers["content-type"]) == (
        200,
        b"",
        got.headers["content-type"],
    )
    assert server.ask.head(TEXT).status_code == 405


def test_requests_have_ids_and_the_log_no_prompts(server):
    secret = "a very private prompt"
    body = {"prompt": secret, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = server.ask.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    other = server.ask.get("/health", headers={"X-Request-Id": 'x" y'})
    assert re.fullmatch(r"req-[0-9a-f]{32}", other.headers["x-request-id"])
    line = next(x for x in server.lines() if x.get("id") == "abc-1")
    assert (line["status"], line["path"], line["completion_tokens"]) == (200, "/v1/completions", 3)
    assert line["prompt_tokens"] == len(secret) + 1
    assert not any(secret in str(x) or answer.json()["choices"][0]["text"] in str(x.values()) for x in [line])


# --- policies ------------------------------------------------------------------------------------


def test_layers_are_said_on_demand(server):
    prompt = "x" * 100
    got = server.complete(prompt, kv_policy="window(16) + sinks(4)", kv_layers=True)["usage"]["kv"]
    assert got["layers"] == [[20, 20], [20, 20]]
    assert got["tokens_kept"] == 20
    assert got["bytes_live"] < got["bytes_full"] / 4
    assert "layers" not in server.complete(prompt)["usage"]["kv"]


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"kv_policy": "snapkw"}, 400, "invalid_policy", "Did you mean 'snapkv'?"),
        ({"kv_policy": "snapkv + uniform(2)"}, 400, "invalid_policy", "2 slots"),
        ({"kv_policy": "auto(0.01)"}, 400, "invalid_policy", "nothing that small was measured"),
        ({"kv_policy": "auto(2)"}, 400, "invalid_policy", "a share of the cache in (0, 1]"),
        ({"kv_policy": "wg-kv"}, 400, "invalid_weights", "ships none"),
        ({"kv_weights": {"write_gate": "default"}}, 400, "invalid_weights", "nothing in"),
        (
            {"kv_policy": "wg-kv", "kv_weights": {"write_gate": "/etc/passwd"}},
            400,
            "invalid_weights",
            "ships no",
        ),
        ({"kv_policy": "wg-kv", "kv_weights": {"gates": "default"}}, 400, "invalid_weights", "ships none"),
    ],
)
def test_policies_that_cannot_be_served_are_refused(server, fields, status, code, words):
    answered, error = server.refusal("/v1/completions", {"prompt": "x"} | fields)
    assert (answered, error["code"]) == (status, code)
    assert words in error["message"]


def test_presets_are_listed(server):
    policies = server.ask.get("/v1/policies").json()
    assert policies["default"] == "full"
    assert policies["allowed"] is None
    assert policies["presets"] == dict(catalogue.PRESETS)
    assert (
        policies["about"]["snapkv"] == "SnapKV: the prompt's last queries vote for the tokens they attend to."
    )
    assert set(policies["about"]) == set(catalogue.PRESETS)


def test_a_watched_text_can_be_looked_at_before_its_first_token(server):
    """Its id comes at once; what it waits for is said, and at the end that it is done."""
    with stopped(server.service.engine) as goes_on:
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "kv_watch": True}
        events = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
        first = next(events)
        assert (first["choices"], first["usage"]) == ([], None)
        goes_on.set()
        *texts, last = events
    assert len([x for x in texts if x["choices"][0]["finish_reason"]]) == 1
    assert last["usage"]["completion_tokens"] == 4
    look = server.ask.get(f"/v1/kv/{first['id']}").json()
    assert (look["stage"], look["done"]) == ("done", True)
    assert look["prompt_tokens"] == look["read_tokens"] == len("Hello") + 1
    plain = next(server.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 4}))
    assert len(plain["choices"]) == 1


# --- refusals ------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TEXT, {}, 422, "prompt"),
        (TEXT, {"prompt": 5}, 422, "prompt"),
        (TEXT, {"prompt": "x", "temperature": "1"}, 422, "temperature"),
        (TEXT, {"prompt": "x", "temperature": -1}, 422, "temperature"),
        (TEXT, {"prompt": "x", "top_p": 0}, 422, "top_p"),
        (TEXT, {"prompt": "x", "n": 0}, 422, "n"),
        (TEXT, {"prompt": "x", "kv_polcy": "full"}, 400, "kv_polcy"),
        (TEXT, {"prompt": "x", "kv_magic": 1}, 400, "kv_magic"),
        (TEXT, {"prompt": "x", "tempreture": 1}, 400, "tempreture"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "naem": "y"}]}, 400, "messages.naem"),
        (TEXT, {"prompt": "x", "presence_penalty": 2.5}, 422, "presence_penalty"),
        (TEXT, {"prompt": "x", "repetition_penalty": 0}, 422, "repetition_penalty"),
        (TEXT, {"prompt": "x", "min_p": 2}, 422, "min_p"),
        (TEXT, {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        (TEXT, {"prompt": "x", "logit_bias": {"260": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"5": 101}}, 422, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, 422, "logit_bias"),
        (TEXT, {"prompt": "x", "logprobs": 21}, 422, "logprobs"),
        (TEXT, {"prompt": [1, -1]}, 422, "prompt"),
        (TEXT, {"prompt": [1, 260]}, 400, "prompt"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {"prompt": "x", "best_of": 2}, 400, "best_of"),
        (TEXT, {"prompt": "x", "n": 9}, 400, "n"),
        (TEXT, {"prompt": ["x"] * 9}, 400, "n"),
        (TEXT, {"prompt": "x", "stop": ["x"] * 17}, 400, "stop"),
        (TEXT, {"prompt": "x", "stop": "x" * 2000}, 400, "stop"),
        (TEXT, {"prompt": "x", "stop_token_ids": [999]}, 400, "stop_token_ids"),
        (TEXT, {"prompt": "x" * 512}, 400, "prompt"),
        (TEXT, {"prompt": "x" * 400, "max_tokens": 200}, 400, "max_tokens"),
        (TEXT, {"prompt": "x", "context": "none"}, 404, "context"),
        (CHAT, {"messages": []}, 422, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, 422, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 422, "messages"),
        (CHAT, HI | {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, HI | {"tools": [{"type": "function"}]}, 422, "tools"),
        (CHAT, HI | {"tools": [{"type": "function", "function": {"name": "x"}}]}, 400, "tools"),
        (CHAT, HI | {"max_tokens": 0}, 422, "max_tokens"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/v1/contexts", {"name": "a b", "prompt": "x"}, 422, "name"),
        ("/v1/contexts", {"name": "a"}, 400, "prompt"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_it_starts(server, path, body, status, param):
    before = server.service.engine.metrics().prompt_tokens
    answered, error = server.refusal(path, body)
    assert (answered, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"].endswith(".")
    assert server.service.engine.metrics().prompt_tokens == before


def test_a_text_that_is_too_long_is_refused_with_the_numbers(server):
    _, error = server.refusal(TEXT, {"prompt": "x" * 400, "max_tokens": 200})
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("401", "200", "601", "512", "111"))


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("PUT", TEXT, 405, "method_not_allowed"),
        ("GET", TEXT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/kv/nobody", 404, "not_watched"),
        ("GET", "/v1/contexts/none", 404, "context_not_found"),
        ("DELETE", "/v1/contexts/none", 404, "context_not_found"),
        ("GET", "/v1/kv/x?choice=y", 422, "int_parsing"),
    ],
)
def test_the_router_refuses_in_the_same_shape(server, method, path, status, code):
    answered, error = server.refusal(path, method=method)
    assert (answered, error["code"]) == (status, code)


def test_a_method_that_is_not_taken_is_told_those_that_are(server):
    allowed = [server.ask.options(path).headers["allow"] for path in (TEXT, "/v1/contexts", "/v1/contexts/x")]
    assert allowed == ["POST", "GET, HEAD, POST", "DELETE, GET, HEAD"]


def test_what_is_no_json_is_refused(server):
    kind = {"Content-Type": "application/json"}
    assert server.refusal(TEXT, content=b"{", headers=kind)[0] == 400
    assert server.refusal(TEXT, content=b"[]", headers=kind)[0] == 422
    assert server.refusal(TEXT, content=b"", headers=kind)[0] == 422
    assert server.refusal(TEXT, content=rb'{"prompt": "\ud800"}', headers=kind)[0] == 400


def test_a_body_that_is_too_large_is_refused_said_or_sent(server):
    kind = {"Content-Type": "application/json"}
    big = b'{"prompt": "' + b"x" * 70000 + b'"}'
    status, error = server.refusal(TEXT, content=big, headers=kind)
    assert (status, error["code"]) == (413, "body_too_large")
    pieces = (big[at : at + 10000] for at in range(0, len(big), 10000))  # sent without saying how much
    assert server.refusal(TEXT, content=pieces, headers=kind)[0] == 413


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1.evil.example:80", 403),
        ("http://localhost:3000", 200),
        ("http://[::1]", 200),
    ],
)
def test_a_page_elsewhere_is_refused_where_there_is_no_key(server, origin, status):
    """It can post here without reading the answer, in the types of content that browsers let pass."""
    body = {"prompt": "x", "max_tokens": 1}
    answer = server.ask.post(TEXT, json=body, headers={"Origin": origin})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "origin_not_allowed"


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"functions": [{}]}, "functions: not supported; leave it out."),
        ({"store": True}, "store: not supported; leave it out."),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format: json_schema comes with type 'json_schema' and no other.",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0.type: 'image_url' is not supported; send 'text'.",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"type": "code"}]}]},
            "messages.0.tool_calls.0.type: 'code' is not supported; send 'function'.",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages.0: content is missing; only an assistant's may be null.",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Give a text or a list of parts.",
        ),
    ],
)
def test_what_is_not_supported_is_named(server, fields, words):
    status, error = server.refusal(CHAT, HI | fields)
    assert (status, error["message"]) == (422, words)


def test_an_assistant_may_have_said_nothing(server):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, *HI["messages"]]
    answer = server.ask.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200


def test_another_host_is_refused_where_there_is_no_key(server):
    """A page elsewhere may make its own name mean 127.0.0.1, and cannot change what the browser sends."""
    assert server.refusal("/v1/models", method="GET", headers={"Host": "evil.example"})[0] == 403
    assert server.ask.get("/v1/models", headers={"Host": "localhost:80"}).status_code == 200
