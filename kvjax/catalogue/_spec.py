"""Policies as one string: ``"snapkv(window=32) + ada(512) + int8"``.

A string is a sum of words. A word is the name of a part with arguments (``quest(chunks=32)``), one of the
protections ``sinks(n)`` and ``recent(n)``, or a preset. What a preset brings along may be overridden by a
part written beside it; two parts written for one place are refused. A word that names parts of two places
(``gvote`` ranks and says how many) fills those that nothing else was written for: ``kvp + gvote`` ranks by
kvp and keeps as many as the votes say, ``gvote + uniform(0.25)`` ranks by votes.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.algebra import Every, Part, Policy, PolicyError
from kvjax.catalogue import _discovery as discovery


class _Presets(Mapping[str, str]):
    """What discovery finds, looked up when it is asked for."""

    def __getitem__(self, name: str) -> str:
        return discovery.presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(discovery.presets())

    def __len__(self) -> int:
        return len(discovery.presets())

    def __repr__(self) -> str:
        return repr(discovery.presets())


PRESETS: Mapping[str, str] = _Presets()
"""Names that stand for a policy, the same everywhere: notebook, command line, server. Each is in the file of
its method.

A preset named like a part brings that part and at most a budget, so that ``repr`` of a policy (which
always shows the budget of an eviction) parses back to it."""

PROTECTIONS = ("sinks", "recent")


def policy(spec: str | Policy) -> Policy:
    """A policy from its one-string form; a policy is returned as it is.

    Raises:
      PolicyError: an unknown word or argument, two parts for one place, or parts that exclude each other.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise PolicyError(f"policy({spec!r}) is no policy. Write one, for example 'snapkv + uniform(512)'.")
    written: dict[str, Any] = {}
    brought: dict[str, Any] = {}
    shared: list[dict[str, Any]] = []
    for word in _words(spec):
        name, arguments = _parse(word, spec)
        if arguments is None and name in PRESETS and len(_kinds(name)) < 2:
            brought |= _preset(name)
            continue
        found = _parts(name, arguments or "", spec)
        if len(found) > 1:
            shared.append(found)
            continue
        ((place, value),) = found.items()
        if place in written:
            raise PolicyError(
                f"policy({spec!r}) gives {place} twice: {written[place]!r} and {value!r}. Keep one of them."
            )
        written[place] = value
    for found in shared:
        free = [p for p in found if p not in written and (p not in brought or p == "budget")]
        if not free:
            parts = " and ".join(f"{place} by {(brought | written)[place]!r}" for place in found)
            raise PolicyError(
                f"policy({spec!r}): {next(iter(found.values()))!r} has no place left, {parts} are taken. "
                "Leave one of them out."
            )
        written |= {place: found[place] for place in free}
    return Policy(**(brought | written))


def _preset(name: str) -> dict[str, Any]:
    """Fields of a preset: its words are parts, never presets again."""
    fields: dict[str, Any] = {}
    for word in _words(PRESETS[name]):
        part, arguments = _parse(word, name)
        if part != "full":
            fields |= _parts(part, arguments or "", name)
    return fields


def _words(spec: str) -> Iterator[str]:
    """The summands; a plus inside parentheses does not count."""
    depth, start = 0, 0
    for at, letter in enumerate(spec):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            yield spec[start:at].strip()
            start = at + 1
    yield spec[start:].strip()


def _parse(word: str, spec: str) -> tuple[str, str | None]:
    """``name(arguments)`` to its two halves; arguments None where there are no parentheses."""
    match = re.fullmatch(r"([a-z][a-z0-9_-]*)\s*(?:\((.*)\))?", word, re.DOTALL)
    if not match:
        raise PolicyError(
            f"policy({spec!r}): {word!r} is no part. Write a sum of names with arguments, such as "
            "'window(256) + sinks(4)'."
        )
    return match[1], match[2]


def _parts(name: str, arguments: str, spec: str) -> dict[str, Any]:
    """The fields of Policy a word may set, and their values: one, or two where parts share the word."""
    values, named = _arguments(name, arguments, spec)
    if name in PROTECTIONS:
        if len(values) != 1 or named:
            raise PolicyError(f"policy({spec!r}): {name} takes one number of tokens, as in {name}(4).")
        return {name: values[0]}
    kinds = _kinds(name)
    if not kinds and name in PRESETS:
        raise PolicyError(
            f"policy({spec!r}): {name} is a preset and takes no arguments. Write its parts with yours: "
            f"'{PRESETS[name]}'."
        )
    if not kinds:
        words = {kind.name for kind in discovery.parts().values()}
        known = sorted({*words, *PRESETS, *PROTECTIONS})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise PolicyError(f"policy({spec!r}): there is no {name!r}. {hint}Known: {', '.join(known)}.")
    return {kind.place: _build(kind, values, named, spec) for kind in kinds}


def _kinds(name: str) -> list[type[Part]]:
    """The parts of that name: none, one, or two of different places."""
    return [kind for kind in discovery.parts().values() if kind.name == name]


def _build(kind: type[Part], values: list[Any], named: dict[str, Any], spec: str) -> Part:
    for old, new in kind.renamed.items():
        if old in named:
            raise PolicyError(
                f"policy({spec!r}): {kind.name}({old}=...) is now {kind.name}({new}=...). Write {new}."
            )
    try:
        inspect.signature(kind).bind(*values, **named)
    except TypeError as error:
        takes = ", ".join(f.name for f in dataclasses.fields(kind)) or "none"  # type: ignore[arg-type]
        raise PolicyError(f"policy({spec!r}): {kind.name}: {error}. Its arguments: {takes}.") from None
    try:
        part = kind(*values, **named)
        hash(part)  # a policy is a static argument of jit
    except TypeError as error:
        raise PolicyError(
            f"policy({spec!r}): {kind.name} is given a value of a wrong kind ({error}). Give numbers, words "
            "or every(k)."
        ) from None
    return part


def _arguments(name: str, text: str, spec: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("not a call")
        named = {str(k.arg): _value(k.value) for k in call.keywords}
        return [_value(x) for x in call.args], named
    except (SyntaxError, TypeError, ValueError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(
            f"policy({spec!r}): cannot read the arguments of {name}({text}): {error}. Use numbers, words, "
            "quoted text and every(k)."
        ) from None


def _value(node: ast.expr) -> Any:
    """A literal, a bare word as text, or every(k)."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "every":
        return Every(*[ast.literal_eval(x) for x in node.args])
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no value") from None
