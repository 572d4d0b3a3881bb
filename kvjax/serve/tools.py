"""Tools in chats: how a model writes a call, which its chat template shows, and calls read out of a text.

Two forms are read: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` between other text (Hermes,
Qwen), and an answer that is one object ``{"name": ..., "parameters": {...}}`` (Llama 3). A call that is not
of its form stays text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the model wrote.

    Attributes:
      name: of the function.
      arguments: a JSON object, as text.
    """

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How calls are written.

    Attributes:
      opening, closing: around a call; "" where it is the whole answer.
      arguments: the key of the arguments.
    """

    opening: str
    closing: str
    arguments: str

    def read(self, text: str) -> Call | None:
        """The call that is written in a text; None where it is none."""
        try:
            content = json.loads(text)
        except ValueError:
            return None
        name, arguments = (content.get(key) for key in ("name", self.arguments)) if _is(content) else ("", "")
        if not isinstance(name, str) or not name or not _is(arguments):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A Lark grammar of one call of one of these functions, for ``Grammars``."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    self.arguments: tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = json.dumps({"anyOf": calls, "x-guidance": form})
        if not self.opening:
            return f"start: call\ncall: %json {schema}\n"
        opening, closing = (json.dumps(x) for x in (f"{self.opening}\n", f"\n{self.closing}"))
        return f"start: {opening} call {closing}\ncall: %json {schema}\n"


HERMES = CallForm("<tool_call>", "</tool_call>", "arguments")
LLAMA = CallForm("", "", "parameters")


def call_form(template: str | None) -> CallForm | None:
    """The form that a chat template shows; None where it shows no tools."""
    if template is None or "tools" not in template:
        return None
    return HERMES if HERMES.opening in template else LLAMA


class CallReader:
    """Takes calls out of a text that comes in pieces; what may be part of one is held back meanwhile.

    Attributes:
      calls: how many there were.
    """

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._held = ""
        self.calls = 0

    def feed(self, piece: str) -> tuple[str, tuple[Call, ...]]:
        """The text that is certainly none of a call, and the calls that are complete now."""
        self._held += piece
        if not self._form.opening:
            begins = self._held.lstrip()[:1] in ("", "{")
            return ("", ()) if begins and not self.calls else (self._take(len(self._held)), ())
        opening, closing = self._form.opening, self._form.closing
        text, calls = "", list[Call]()
        while (at := self._held.find(opening)) >= 0:
            end = self._held.find(closing, at)
            text += self._take(at)
            if end < 0:
                return text, tuple(calls)
            written = self._take(end - at + len(closing))
            call = self._form.read(written[len(opening) : -len(closing)])
            if call is None:
                text += written
            else:
                calls.append(call)
                self.calls += 1
        tails = (n for n in range(len(opening) - 1, 0, -1) if self._held.endswith(opening[:n]))
        return text + self._take(len(self._held) - next(tails, 0)), tuple(calls)

    def finish(self) -> tuple[str, tuple[Call, ...]]:
        """What was held back, once no more text comes."""
        held = self._take(len(self._held))
        call = None if self._form.opening else self._form.read(held)
        if call is None:
            return held, ()
        self.calls += 1
        return "", (call,)

    def _take(self, characters: int) -> str:
        taken, self._held = self._held[:characters], self._held[characters:]
        return taken


def _is(value: Any) -> bool:
    return isinstance(value, dict)
