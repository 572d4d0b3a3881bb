"""Tools in chats: how a model writes a call, which its chat template shows, and calls read out of a text.

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, between other text
    Llama 3        an answer that is one object {"name": ..., "parameters": {...}}
    Mistral        [TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]  (tokenizers 2 to 7)
                   [TOOL_CALLS]name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}, each  (from 11 on)

What a bracket holds in Mistral's forms is one special token (https://github.com/mistralai/mistral-common). A
call that is not of its form stays text.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TokenId = Callable[[str], int | None]
"""The id of a token by its name; None where the vocabulary has none of that name."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the model wrote.

    Attributes:
      name: of the function.
      arguments: a JSON object, as text.
      id: as the model wrote it, or made up; calls are equal without it.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(
        default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False, kw_only=True
    )


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How calls are written: one object in each.

    Attributes:
      opening, closing: around a call; "" where it is the whole answer.
      arguments: the key of the arguments.
      marks: special tokens that calls are told by; an answer that may have calls shows them.
    """

    opening: str
    closing: str
    arguments: str
    marks: tuple[str, ...] = ()

    def read(self, text: str) -> Call | None:
        """The call that is written in a text; None where it is none."""
        try:
            return _call(json.loads(text), self.arguments)
        except ValueError:
            return None

    def taken(self, text: str) -> tuple[int, tuple[Call, ...]] | None:
        """What a text that starts with ``opening`` begins with; None until that is known.

        Returns:
          Its characters, and the calls in it; () where these characters are no call.
        """
        end = text.find(self.closing)
        if end < 0:
            return None
        call = self.read(text[len(self.opening) : end])
        return end + len(self.closing), () if call is None else (call,)

    def grammar(self, tools: Sequence[Mapping[str, Any]], token_id: TokenId) -> str:
        """A Lark grammar of one call of one of these functions, for ``Grammars``."""
        del token_id
        if not self.opening:
            return f"start: call\ncall: %json {_schema(tools, self.arguments)}\n"
        opening, closing = (json.dumps(x) for x in (f"{self.opening}\n", f"\n{self.closing}"))
        return f"start: {opening} call {closing}\ncall: %json {_schema(tools, self.arguments)}\n"


@dataclasses.dataclass(frozen=True)
class ListForm(CallForm):
    """A special token, and behind it a JSON list of calls."""

    def taken(self, text: str) -> tuple[int, tuple[Call, ...]] | None:
        found = _decoded(text, len(self.opening), "]")
        if found is None:
            return None
        content, end = found
        calls = [_call(one, self.arguments, nine=True) for one in content if isinstance(content, list)]
        return end, tuple(call for call in calls if call) if all(calls) else ()

    def grammar(self, tools: Sequence[Mapping[str, Any]], token_id: TokenId) -> str:
        opening = _token(self.opening, token_id)
        return f'start: {opening} " [" call "]"\ncall: %json {_schema(tools, self.arguments)}\n'


@dataclasses.dataclass(frozen=True)
class NamedForm(CallForm):
    """Each call is a special token, the name, another special token and the arguments."""

    def taken(self, text: str) -> tuple[int, tuple[Call, ...]] | None:
        head = _NAMED.match(text, len(self.opening))
        found = None if head is None else _decoded(text, head.end(), "}")
        if head is None or found is None:
            return None
        content, end = found
        call = _call({"name": head["name"], "arguments": content, "id": head["id"]}, "arguments", nine=True)
        return end, () if call is None else (call,)

    def grammar(self, tools: Sequence[Mapping[str, Any]], token_id: TokenId) -> str:
        opening, closing = (_token(mark, token_id) for mark in (self.opening, self.closing))
        rules = [
            f"call_{at}: {json.dumps(tool['name'])} {closing} arguments_{at}\n"
            f"arguments_{at}: %json {json.dumps(_parameters(tool) | _PLAIN)}\n"
            for at, tool in enumerate(tools)
        ]
        names = " | ".join(f"call_{at}" for at in range(len(rules)))
        return f"start: {opening} ({names})\n{''.join(rules)}"


HERMES = CallForm("<tool_call>", "</tool_call>", "arguments")
LLAMA = CallForm("", "", "parameters")
MISTRAL_LIST = ListForm("[TOOL_CALLS]", "", "arguments", ("[TOOL_CALLS]",))
MISTRAL = NamedForm("[TOOL_CALLS]", "[ARGS]", "arguments", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))

_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w*))?\[ARGS\]")
_PLAIN = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def call_form(template: str | None) -> CallForm | None:
    """The form that a chat template shows; None where it shows no tools."""
    if template is None or "tools" not in template:
        return None
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL if MISTRAL.closing in template else MISTRAL_LIST
    return LLAMA


def _call(content: Any, key: str, *, nine: bool = False) -> Call | None:
    """The call that an object is; ``nine``: its id must have nine letters and digits, as Mistral's have."""
    name, arguments = (content.get(key) for key in ("name", key)) if isinstance(content, dict) else ("", "")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    if not nine:
        return Call(name, written)
    id = content.get("id")
    return Call(
        name,
        written,
        id=id if isinstance(id, str) and re.fullmatch("[a-zA-Z0-9]{9}", id) else uuid.uuid4().hex[:9],
    )


def _decoded(text: str, begin: int, last: str) -> tuple[Any, int] | None:
    """The JSON that begins there, and where it ends; None while it is not complete."""
    if last not in text[begin:]:  # each piece of a long one would be read anew
        return None
    try:
        return json.JSONDecoder().raw_decode(text, len(text) - len(text[begin:].lstrip()))
    except ValueError:
        return None


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool.get("parameters") or {"type": "object"})


def _schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """JSON schema of a call of one of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, arguments: _parameters(tool)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps({"anyOf": calls} | _PLAIN)


def _token(mark: str, token_id: TokenId) -> str:
    """A special token in a grammar; its letters where the vocabulary does not have it."""
    id = token_id(mark)
    return json.dumps(mark) if id is None else f"<[{id}]>"


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
        opening = self._form.opening
        text, calls = "", list[Call]()
        while (at := self._held.find(opening)) >= 0:
            text += self._take(at)
            taken = self._form.taken(self._held)
            if taken is None:
                return text, tuple(calls)
            characters, found = taken
            written = self._take(characters)
            calls += found
            self.calls += len(found)
            text += "" if found else written
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
