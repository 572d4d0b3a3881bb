"""Answers of a form: grammars over HTTP, and calls of tools, whole and streamed.

One server of a random model, so that nothing but the grammar brings the form about.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_client import Running, running

from kvjax.serve.tools import HERMES, LLAMA, MISTRAL, MISTRAL_LIST, Call, CallReader, call_form

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool.function.name }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>
{%- endfor %}
{% endfor %}assistant: """
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "map")
]
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120, "temperature": 1.5}


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory) -> Iterator[Running]:
    pytest.importorskip("llguidance", reason="pip install 'kvjax[grammar]'")
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running(folder) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "fields", "form"),
    [
        (TEXT, {"structured_outputs": {"regex": "[0-9]{4}-[a-f]{2}"}}, "[0-9]{4}-[a-f]{2}"),
        (TEXT, {"structured_outputs": {"choice": ["tea", "coffee (black)"]}}, r"tea|coffee \(black\)"),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": TOOLS[0]["function"]["parameters"]},
                }
            },
            r'\{"city": "(Oslo|Rome)"\}',
        ),
    ],
)
def test_an_answer_keeps_to_its_form(server, path, fields, form):
    body = {"prompt": "Hi", "max_tokens": 60, "temperature": 1.5} if path == TEXT else HI
    choices = server.ask.post(path, json=body | fields | {"n": 2, "seed": 1}).json()["choices"]
    texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in choices]
    assert all(re.fullmatch(form, text) for text in texts), texts
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in choices} == {("stop", None)}
    streamed = [event["choices"][0] for event in server.stream(path, body | fields | {"seed": 1})]
    parts = [x["text"] if path == TEXT else x["delta"].get("content", "") for x in streamed]
    assert "".join(parts) == texts[0]


def test_an_object_is_one(server):
    answer = server.ask.post(CHAT, json=HI | {"response_format": {"type": "json_object"}, "seed": 3}).json()
    (choice,) = answer["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "map"}}])
def test_a_call_that_must_come_comes(server, choice):
    body = HI | {"tools": TOOLS, "tool_choice": choice, "seed": 2}
    answer = server.ask.post(CHAT, json=body).json()
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], answer["choices"][0]["finish_reason"]) == (None, "tool_calls")
    assert call["function"]["name"] in (["map"] if isinstance(choice, dict) else ["weather", "map"])
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    deltas = [event["choices"][0] for event in server.stream(CHAT, body)]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert [(x["index"], x["function"]) for x in calls] == [(0, call["function"])]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == ""
    assert deltas[-1]["finish_reason"] == "tool_calls"
    # The call and its result can be sent back.
    turns = [*HI["messages"], message, {"role": "tool", "content": "12 C", "tool_call_id": call["id"]}]
    again = server.ask.post(CHAT, json={"messages": turns, "tools": TOOLS, "max_tokens": 2})
    assert again.status_code == 200, again.text
    assert again.json()["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]


def test_tools_are_shown_to_the_model(server):
    tokens = [
        server.ask.post(CHAT, json=HI | more | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
    ]
    assert tokens[1] > tokens[0] == tokens[2]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        (TEXT, {"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        (TEXT, {"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        (TEXT, {"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice",
        ),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            CHAT,
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(server, path, fields, param):
    body = {"prompt": "x", "max_tokens": 9} if path == TEXT else HI
    status, error = server.refusal(path, body | fields)
    assert (status, error["param"]) == (400, param)
    assert error["message"].endswith(".")


# --- Mistral: what calls are told by is a special token -------------------------------------------

MISTRAL_TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}{{ message.content }}{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}WRITTEN
{%- endfor %}{% endfor %}"""
WRITTEN = {
    MISTRAL: "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    MISTRAL_LIST: "[TOOL_CALLS] [{{ call.function | tojson }}]",
}


@pytest.mark.parametrize("form", [MISTRAL, MISTRAL_LIST])
def test_calls_that_special_tokens_tell(form, tiny_folder, tmp_path):
    pytest.importorskip("llguidance", reason="pip install 'kvjax[grammar]'")
    from tokenizers import Tokenizer

    shutil.copytree(tiny_folder, tmp_path / "model")
    file = str(tmp_path / "model" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tokenizer.save(file)
    (tmp_path / "model" / "chat_template.jinja").write_text(
        MISTRAL_TEMPLATE.replace("WRITTEN", WRITTEN[form])
    )
    with running(tmp_path / "model") as server:
        body = HI | {"tools": TOOLS, "tool_choice": "required", "seed": 2}
        answer = server.ask.post(CHAT, json=body).json()
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], answer["choices"][0]["finish_reason"]) == (None, "tool_calls")
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
        deltas = [event["choices"][0]["delta"] for event in server.stream(CHAT, body)]
        assert [x["function"] for delta in deltas for x in delta.get("tool_calls", [])] == [call["function"]]
        assert "".join(delta.get("content", "") for delta in deltas) == ""
        # The template, which is as strict about ids as Mistral's, takes the call back.
        turns = [*HI["messages"], message, {"role": "tool", "content": "12 C", "tool_call_id": call["id"]}]
        again = server.ask.post(CHAT, json={"messages": turns, "tools": TOOLS, "max_tokens": 2})
        assert again.status_code == 200, again.text
        # Without tools the same token is special, and not shown.
        plain = {"prompt": "x", "max_tokens": 1, "logit_bias": {"258": 100}}
        assert server.ask.post(TEXT, json=plain).json()["choices"][0]["text"] == ""


# --- reading calls -------------------------------------------------------------------------------

ONE = '{"name": "map", "arguments": {"city": "Oslo"}}'
CASES = [
    (HERMES, f"a <b <tool_call>\n{ONE}\n</tool_call> c", "a <b  c", [Call("map", '{"city": "Oslo"}')]),
    (
        HERMES,
        f"<tool_call>{ONE}</tool_call><tool_call>{ONE}</tool_call>",
        "",
        2 * [Call("map", '{"city": "Oslo"}')],
    ),
    (HERMES, "<tool_call>{no}</tool_call>", "<tool_call>{no}</tool_call>", []),
    (HERMES, f"x<tool_call>{ONE}", f"x<tool_call>{ONE}", []),
    (LLAMA, ONE.replace("arguments", "parameters"), "", [Call("map", '{"city": "Oslo"}')]),
    (LLAMA, "{not json}", "{not json}", []),
    (LLAMA, f"text, then {ONE}", f"text, then {ONE}", []),
    (MISTRAL_LIST, f"a [b [TOOL_CALLS] [{ONE}, {ONE}] c", "a [b  c", 2 * [Call("map", '{"city": "Oslo"}')]),
    (MISTRAL_LIST, f"[TOOL_CALLS][{ONE}", f"[TOOL_CALLS][{ONE}", []),
    (MISTRAL_LIST, f"[TOOL_CALLS] [{ONE}, 5]", f"[TOOL_CALLS] [{ONE}, 5]", []),
    (MISTRAL_LIST, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (
        MISTRAL,
        'x[TOOL_CALLS]map[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"at": {}} y',
        "x y",
        [Call("map", '{"city": "Oslo"}'), Call("weather", '{"at": {}}')],
    ),
    (MISTRAL, "[TOOL_CALLS]map[ARGS][5] {}", "[TOOL_CALLS]map[ARGS][5] {}", []),
    (MISTRAL, '[TOOL_CALLS]map {"city": 1}', '[TOOL_CALLS]map {"city": 1}', []),
]


@pytest.mark.parametrize(("form", "text", "rest", "calls"), CASES)
def test_calls_are_read_whatever_pieces_they_come_in(form, text, rest, calls):
    for width in (1, 2, 3, 7, len(text)):
        reader, shown, read = CallReader(form), "", []
        for at in range(0, len(text), width):
            part, new = reader.feed(text[at : at + width])
            shown, read = shown + part, [*read, *new]
            assert rest.startswith(shown)  # nothing of a call is ever shown
        part, new = reader.finish()
        assert (shown + part, [*read, *new]) == (rest, calls)
        assert reader.calls == len(calls)


def test_the_template_shows_the_form():
    assert call_form(TEMPLATE) == HERMES
    assert call_form("{% if tools %}{{ tools | tojson }}{% endif %}") == LLAMA
    assert call_form("{% if tools %}[TOOL_CALLS] [") == MISTRAL_LIST
    assert call_form("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]") == MISTRAL
    assert call_form("{{ messages }}") is None
    assert call_form(None) is None
