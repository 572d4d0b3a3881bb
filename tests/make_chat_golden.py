"""Makes tests/golden/chat.json: conversations as transformers' ``apply_chat_template`` writes them.

The library and its tests need no transformers; this script does, in an environment of its own:

    python -m venv gold && gold/bin/pip install transformers==5.2.0 jinja2
    gold/bin/python tests/make_chat_golden.py

Made with transformers 5.2.0 and jinja2 3.1.6. The templates in tests/golden/chat are those of published
models, written down from memory; generation_tag.jinja is our own, for what none of them has. Each is saved
into a folder as a model carries it: in tokenizer_config.json or as chat_template.jinja, in turns. The file
holds:

  now                 the time that strftime_now tells
  conversations       by name: messages, and tools where the model may call some
  models              by template: special_tokens, and texts. A text has its conversation, the arguments of
                      apply_chat_template, and the text; or null where the template refuses the messages.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

GOLDEN = Path(__file__).parent / "golden"
NOW = "2026-03-05T14:07:09"

SYSTEM = {"role": "system", "content": 'You are terse. Answer <in> "one" line & no more.'}
USER = {"role": "user", "content": "  Name three large cities in France.\n"}
ANSWER = {"role": "assistant", "content": "Paris, Lyon & Marseille.\n"}
MORE = {"role": "user", "content": "{{ bos_token }} Et 日本 😀?"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Today\'s weather in a city, "as it is" <now>.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name, e.g. Orléans"},
                "unit": {"type": "string", "enum": ["°C", "°F"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "get_weather", "arguments": {"city": "Orléans", "unit": "°C"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "21 °C"}
THOUGHT = {"role": "assistant", "content": "<think>\nThree of them.\n</think>\n\nParis, Lyon, Lille."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": " Describe "}, {"type": "text", "text": "this."}],
}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ANSWER, MORE]},
    "answered": {"messages": [SYSTEM, USER, ANSWER]},
    "twice": {"messages": [USER, USER]},
    "thought": {"messages": [USER, THOUGHT, MORE]},
    "parts": {"messages": [PARTS]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, CLOCK]},
    "called": {"messages": [USER, CALL, RESULT], "tools": [WEATHER]},
    "told": {"messages": [USER, CALL, RESULT, ANSWER, MORE], "tools": [WEATHER, CLOCK]},
    "skipped": {"messages": [USER, {"role": "skip", "content": "not this"}, ANSWER, MORE]},
    "tools in the message": {"messages": [SYSTEM | {"tools": json.dumps([WEATHER])}, USER]},
}
PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("one", {}),
    ("one", {"add_generation_prompt": False}),
    ("system", {}),
    ("turns", {}),
    ("answered", {"add_generation_prompt": False}),
    ("answered", {"continue_final_message": True}),
    ("twice", {}),
]
TOOLS: list[tuple[str, dict[str, Any]]] = [("tools", {}), ("called", {}), ("told", {})]
MODELS: dict[str, tuple[dict[str, str], list[tuple[str, dict[str, Any]]]]] = {
    "smollm2": ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, PLAIN),
    "zephyr": ({"bos_token": "<s>", "eos_token": "</s>"}, PLAIN),
    "llama3_1": (
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        [
            *(PLAIN + TOOLS),
            ("system", {"date_string": "05 Mar 2026"}),
            ("tools", {"tools_in_user_message": False}),
            ("turns", {"builtin_tools": ["brave_search", "code_interpreter"]}),
        ],
    ),
    "llama3_2": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, PLAIN + TOOLS),
    "qwen2_5": ({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, PLAIN + TOOLS),
    "qwen3": (
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        [*PLAIN, *TOOLS, ("thought", {}), ("one", {"enable_thinking": False})],
    ),
    "gemma2": ({"bos_token": "<bos>", "eos_token": "<eos>"}, PLAIN),
    "gemma3": ({"bos_token": "<bos>", "eos_token": "<eos>"}, [*PLAIN, ("parts", {})]),
    "phi3": ({"bos_token": "<s>", "eos_token": "<|endoftext|>"}, PLAIN),
    "phi4_mini": (
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        [*PLAIN, ("tools in the message", {})],
    ),
    "mistral_v3": ({"bos_token": "<s>", "eos_token": "</s>"}, PLAIN + TOOLS),
    "generation_tag": (
        {"eos_token": "<|im_end|>"},
        [*PLAIN, ("skipped", {}), ("turns", {"documents": [{"title": "A", "text": "b"}]})],
    ),
}


class Then(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Then:
        return cls.fromisoformat(NOW)


def main() -> None:
    """Writes the file."""
    chat_template_utils.datetime = Then
    written = {}
    for number, (name, (special, cases)) in enumerate(MODELS.items()):
        template = (GOLDEN / "chat" / f"{name}.jinja").read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            vocab = {token: at for at, token in enumerate(dict.fromkeys(["<unk>", *special.values()]))}
            Tokenizer(models.WordLevel(vocab, unk_token="<unk>")).save(f"{folder}/tokenizer.json")
            config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
            if number % 2:
                (Path(folder) / "chat_template.jinja").write_text(template, encoding="utf-8")
            else:
                config["chat_template"] = template
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [
            {"conversation": case, "arguments": arguments, "text": render(tokenizer, case, arguments)}
            for case, arguments in cases
        ]
        written[name] = {"special_tokens": special, "texts": texts}
    versions = {"transformers": transformers.__version__, "jinja2": jinja2.__version__}
    content = versions | {"now": NOW, "conversations": CONVERSATIONS, "models": written}
    (GOLDEN / "chat.json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def render(tokenizer: Any, case: str, arguments: dict[str, Any]) -> str | None:
    """The text, None where it is refused."""
    ends = "continue_final_message" in arguments
    arguments = {"add_generation_prompt": not ends} | arguments
    try:
        return tokenizer.apply_chat_template(
            CONVERSATIONS[case]["messages"],
            tools=CONVERSATIONS[case].get("tools"),
            tokenize=False,
            **arguments,
        )
    except jinja2.TemplateError as error:
        print(f"{case}: {error}")
        return None


if __name__ == "__main__":
    main()
