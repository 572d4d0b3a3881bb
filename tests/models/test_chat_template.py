"""Chat templates: the text that transformers makes of published ones, and what is refused."""

from __future__ import annotations

import copy
import datetime
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models

from kvjax import chat_template
from kvjax.models import hf
from kvjax.text import Text

GOLDEN = Path(__file__).parents[1] / "golden"
GOLD = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))
DOUBLES = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = TWICE %}{% endfor %}"
SETS = "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def spec(golden_folder):
    return hf.read_spec(golden_folder("llama3"))[0]


@pytest.fixture
def place(tmp_path):
    """Makes a model's folder of a tokenizer_config.json and other files, by name."""

    def make(config: dict, **files: str) -> Path:
        vocab = {token: at for at, token in enumerate(["<pad>", "<s>", "</s>"])}
        Tokenizer(models.WordLevel(vocab, unk_token="<pad>")).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in files.items():
            (tmp_path / f"chat_template.{name}").write_text(content, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture
def written():
    """Renders one message with a template that stands nowhere."""

    def render(template: str | None, messages: list[dict] = HELLO, **arguments) -> str:
        tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1}, unk_token="<pad>"))
        text = Text(tokenizer, bos=1, template=template, place="the chat template of here.gguf")
        return text.render(messages, **arguments)

    return render


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("name", GOLD["models"])
def test_the_text_is_that_of_transformers(name, as_file, place, spec, monkeypatch):
    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(GOLD["now"])

    monkeypatch.setattr(chat_template, "datetime", SimpleNamespace(datetime=Then))
    gold = GOLD["models"][name]
    template = (GOLDEN / "chat" / f"{name}.jinja").read_text(encoding="utf-8")
    config = gold["special_tokens"] | ({} if as_file else {"chat_template": template})
    text = Text.load(place(config, **({"jinja": template} if as_file else {})), spec)
    assert text.template == template
    for gold_text in gold["texts"]:
        conversation = copy.deepcopy(GOLD["conversations"][gold_text["conversation"]])
        messages, tools = conversation["messages"], conversation.get("tools")
        if gold_text["text"] is None:
            with pytest.raises(ValueError, match="refused by the chat template in .*Change the messages"):
                text.render(messages, tools=tools, **gold_text["arguments"])
        else:
            assert text.render(messages, tools=tools, **gold_text["arguments"]) == gold_text["text"]
        assert conversation == GOLD["conversations"][gold_text["conversation"]], "messages were changed"


def test_where_a_template_is_found(place, spec):
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    text = Text.load(place({"chat_template": several}), spec)
    assert text.template == "plain"
    assert [text.render(HELLO), text.render(HELLO, tools=[])] == ["plain", "tools"]
    more = {"json": json.dumps({"chat_template": "of json"})}
    assert Text.load(place({"chat_template": several}, **more), spec).render(HELLO) == "of json"
    assert Text.load(place({"chat_template": several}, **more, jinja="of jinja"), spec).template == "of jinja"
    assert Text.load(place({}, json='{"chat_template": null}', jinja=""), spec).template is None


def test_special_tokens_have_names(place, spec, written):
    shown = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ add_bos_token }}"
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": None,
        "add_bos_token": True,
        "chat_template": shown,
    }
    folder = place(config | {"extra_special_tokens": {"image_token": "<img>"}})
    assert Text.load(folder, spec).render(HELLO) == "<s><img>"
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "</s>"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": shown + "{{ pad_token }}"}))
    assert Text.load(folder, spec).render(HELLO) == "</s><pad>"
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text(shown)
    assert Text.load(folder, spec).render(HELLO) == "<s></s>"  # those of the model's ids
    assert written(shown) == "<s>"


def test_a_template_decides_about_bos(place, spec):
    text = Text.load(place({"bos_token": "<s>", "chat_template": "{{ bos_token }}"}), spec)
    assert text.chat(HELLO) == [1]
    assert Text.load(place({"chat_template": "</s>"}), spec).chat(HELLO) == [2]
    assert Text.load(place({"bos_token": "<s>"}), spec).chat([{"role": "user", "content": "</s>"}]) == [1, 2]


def test_the_last_message_goes_on(written):
    said = [*HELLO, {"role": "assistant", "content": "I say "}]
    keeps = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ add_generation_prompt }}"
    assert written(keeps, said, continue_final_message=True) == "[hello][I say "
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert written(trims, said, continue_final_message=True) == "[hello][I say"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    assert written("{{ messages[0].content[0].text }}.", parts, continue_final_message=True) == "a"
    with pytest.raises(ValueError, match="here.gguf does not show it"):
        written("{{ messages[0].content }}", said, continue_final_message=True)
    with pytest.raises(ValueError, match="needs text in the last message"):
        written("", [{"role": "assistant", "tool_calls": [{}]}], continue_final_message=True)


def test_a_conversation_without_a_template_goes_on_too(written):
    said = [*HELLO, {"role": "assistant", "content": "I say "}]
    assert written(None, said, continue_final_message=True) == "hello\nI say "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% if %}",
            r"^chat\(\.\.\.\) cannot read the chat template of here.gguf \(line 1: .*\)\. Repair it",
        ),
        ("\n\n{% nonsense %}", "cannot read .* .line 3: "),
        ("{{ '}' ", "cannot read"),
        (
            "{{ raise_exception('no\n clowns.') }}",
            r"refused by the chat template of here.gguf: no clowns\. Ch",
        ),
        ("{{ messages[0].nothing.at_all }}", "refused by .* has no attribute 'nothing'"),
        ("{{ messages[0]['content'] + 1 }}", "fails in .* .TypeError: "),
        ("{% include 'secrets' %}", "fails in .*"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails in .* .RecursionError"),
        ("{{ messages.append(1) }}", "does what a template may not: "),
        ("{{ ''.__class__.__mro__ }}", "does what a template may not: .*unsafe"),
        ("{{ raise_exception.__globals__.json }}", "does what a template may not: "),
        ("{% for i in range(10**9) %}{% endfor %}", "fails in .* .OverflowError"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "200,000 turns"),
        ("{% for i in range(9999) %}{% for j in range(9999) if j < 0 %}{% endfor %}{% endfor %}", "turns"),
        ("{% for i in range(99999) %}{{ 'abcdefgh' * 999 }}{% endfor %}", "more than 16,777,216 characters"),
        ("{{ 'a' * 10**10 }}", "more than 16,777,216 characters"),
        ("{{ ([1] * 10**10) | length }}", "more than 16,777,216 characters"),
        ("{{ 9 ** 99999 }}", "a number of more than 100,000 bits"),
        (DOUBLES.replace("'ab'", "2").replace("TWICE", "n.x * n.x"), "a number of more than 100,000 bits"),
        *((DOUBLES.replace("TWICE", twice), "16,7") for twice in ("n.x ~ n.x", "n.x + n.x", "n.x * 2")),
        (DOUBLES.replace("{% set n.x = TWICE %}", SETS), "16,7"),
    ],
)
def test_bad_templates_are_one_sentence_that_names_their_place(template, message, written):
    with pytest.raises(ValueError, match=message) as caught:
        written(template)
    assert "the chat template of here.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"json": '{"chat_template": 5}'}, r"chat_template in .*chat_template\.json must be text, or a list"),
        ({"json": '{"chat_template": [{"name": "rag", "template": "x"}]}'}, "must be text, or a list"),
        ({"json": '{"chat_template": ["x"]}'}, "must be text, or a list"),
        ({"json": "{"}, r"chat_template\.json is not a readable JSON object"),
        ({"jinja": "\udcff"}, r"chat_template\.jinja is not UTF-8 text"),
    ],
)
def test_damaged_files_are_named(files, message, place, spec):
    folder = place({}, **{name: content for name, content in files.items() if name != "jinja"})
    if "jinja" in files:
        (folder / "chat_template.jinja").write_bytes(files["jinja"].encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Text.load(folder, spec)


def test_messages_are_checked_before_the_template_sees_them(written):
    for messages in (
        [],
        "hello",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
    ):
        with pytest.raises(ValueError, match="'role' and 'content'"):
            written("x", messages)
    assert written("x", [{"role": "assistant", "content": None, "tool_calls": [{}]}]) == "x"
