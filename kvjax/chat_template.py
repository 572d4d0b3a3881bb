"""Chat templates: a conversation as the text that a model was trained on, by sandboxed jinja2 alone.

The text is that of transformers' ``apply_chat_template``. A template is a program that came with a model, so
the size of its text and the turns of its loops are bounded.

Why: kvjax/DESIGN.md, 22.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from kvjax.errors import UserError

MOST_CHARACTERS = 2**24
"""The longest text of a template; more than the contexts of today hold."""

MOST_TURNS = 200_000
"""Turns of all loops of one rendering."""

MOST_BITS = 10**5
"""Of a whole number that a template makes by powers and products."""

_MARK = "KVJAX_ENDS_HERE "  # ends with a blank, so that a template that trims the message shows itself

_turns: ContextVar[int] = ContextVar("turns")


class ChatTemplateError(UserError):
    """A chat template that cannot be read, refuses the messages, or does what no template may."""


class ChatTemplate:
    """A chat template; compiled when it is first rendered.

    Attributes:
      source: its text.
      place: where it came from, for messages.
    """

    def __init__(self, source: str, place: str) -> None:
        self.source = source
        self.place = place

    @functools.cached_property
    def _compiled(self) -> Any:
        try:
            return _ENVIRONMENT.from_string(self.source)
        except Exception as error:  # also such as deeper nesting than Python compiles
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ChatTemplateError(
                f"chat(...) cannot read {self.place} ({line}{_one_line(error)}). Repair it, or give the "
                "prompt without a template."
            ) from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """The text of a conversation. Arguments are those of ``Text.render``.

        Raises:
          ChatTemplateError: see the class.
        """
        template, last = self._compiled, ""
        if continue_final_message:
            messages = copy.deepcopy(messages)
            last = _mark_end(messages[-1])
        turns = _turns.set(0)
        try:
            text = _joined(
                template.generate(
                    {"documents": None}
                    | variables
                    | {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
                )
            )
        except SecurityError as error:
            raise ChatTemplateError(
                f"chat(...) has stopped {self.place}, which does what a template may not: "
                f"{_one_line(error)}. Take the template of a model that you trust."
            ) from None
        except TemplateError as error:
            raise ChatTemplateError(
                f"chat(...) is refused by {self.place}: {_one_line(error)}. Change the messages."
            ) from None
        except Exception as error:
            raise ChatTemplateError(
                f"chat(...) fails in {self.place} ({type(error).__name__}: {_one_line(error)}). Change the "
                "messages, or repair the template."
            ) from None
        finally:
            _turns.reset(turns)
        return self._cut(text, last) if continue_final_message else text

    def _cut(self, text: str, last: str) -> str:
        """The text up to the mark behind the last message; blanks go where the template trimmed it."""
        at = text.rfind(_MARK.strip())
        if at < 0 or last.strip() not in text:
            raise ChatTemplateError(
                f"chat(continue_final_message=True) needs the last message's text as it is, and {self.place} "
                "does not show it. Leave the argument out, or change that message."
            )
        return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _mark_end(message: dict[str, Any]) -> str:
    """Puts the mark behind the message's last text; gives that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise ChatTemplateError(
        "chat(continue_final_message=True) needs text in the last message. Give it some, or leave the "
        "argument out."
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


# --- the sandbox ---------------------------------------------------------------------------------


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise SecurityError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")


def _joined(parts: Iterable[str]) -> str:
    """Texts put together, while they are short enough."""
    out, size = [], 0
    for part in parts:
        size += len(part)
        _check_size(size)
        out.append(part)
    return "".join(out)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which loops and texts are bounded."""

    intercepted_binops = frozenset(["+", "*", "**"])
    concat = staticmethod(_joined)  # of macros and of blocks that are assigned

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def turn(self) -> bool:
        """Counts a turn of a loop; True."""
        count = _turns.get() + 1
        _turns.set(count)
        if count > MOST_TURNS:
            raise SecurityError(f"its loops take more than {MOST_TURNS:,} turns")
        return True

    def join_operands(self, *parts: Any) -> str:
        """What ``~`` gives."""
        return _joined(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses results that would be too large, before they are made."""
        sized = [side for side in (left, right) if isinstance(side, (str, list, tuple))]
        whole = [side for side in (left, right) if isinstance(side, int)]
        if len(sized) == 2:
            _check_size(len(left) + len(right))
        elif sized and whole:
            _check_size(len(sized[0]) * whole[0])
        elif len(whole) == 2:
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > MOST_BITS:
                raise SecurityError(f"it makes a number of more than {MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Makes loops count their turns, and ``~`` look at the size of what it makes."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None, lineno=node.lineno)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        else:
            node.test = nodes.And(turn, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_operands")
        return nodes.Call(join, node.nodes, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}`` marks what the model says, for training; here its body is text like all other."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


_ENVIRONMENT = _environment()
