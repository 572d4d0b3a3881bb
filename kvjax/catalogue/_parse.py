"""Policies as one string: ``"snapkv(window=32) + ada(512) + int8"``.

A string is a sum of words. A word is the name of a part with arguments (``quest(chunks=32)``), a protection
(``sinks(n)``, ``recent(n)``), or a preset. A part written beside a preset replaces the preset's part of that
place; two parts written for one place are refused. A word that names parts of two places (``gvote`` ranks and
counts) fills those places for which nothing else is written: ``kvp + gvote`` ranks by kvp and keeps as many
tokens as have votes, ``gvote + uniform(0.25)`` ranks by votes. A wrapper follows the eviction that it holds:
``snapkv + critical + ada(0.25)``; several apply in the order written. A part may be the argument of another
one: ``snapkv + then(knorm) + uniform(512, every(64))``, ``draft(quest(chunks=8))``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvjax.algebra import Every, OfPlace, Part, Policy, PolicyError
from kvjax.catalogue import _discovery as discovery


class _Presets(Mapping[str, str]):
    """Imports the methods only when a preset is looked up."""

    def __getitem__(self, name: str) -> str:
        return discovery.presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(discovery.presets())

    def __len__(self) -> int:
        return len(discovery.presets())

    def __repr__(self) -> str:
        return repr(discovery.presets())


PRESETS: Mapping[str, str] = _Presets()
"""Names for policies, the same in notebook, command line and server; each stands in the file of its method.

A preset with the name of a part consists of that part and at most a budget. ``repr`` of a policy, which
always shows the budget of an eviction, then parses back to it."""

PROTECTIONS = ("sinks", "recent")

LONGEST = 1000
"""Characters of a policy; Python's parser recurses over the text."""


def policy(spec: str | Policy) -> Policy:
    """A policy from its one-string form; a policy is returned unchanged.

    Raises:
      PolicyError: an unknown word or argument, two parts for one place, or parts that exclude each other.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise PolicyError(
            f"policy({spec!r}) is not a policy. Write one, for example 'snapkv + uniform(512)'."
        )
    if len(spec) > LONGEST:
        raise PolicyError(
            f"policy({spec[:40]!r}...) has {len(spec)} characters. Write a policy in at most {LONGEST}."
        )
    written: dict[str, Any] = {}
    preset: dict[str, Any] = {}
    shared: list[dict[str, Any]] = []  # of each word that names parts of two places
    wrappers: list[tuple[str, _Wrap]] = []
    for word in _words(spec):
        name, arguments = _parse(word, spec)
        if arguments is None and name in PRESETS and len(_kinds(name)) < 2:
            preset |= _preset(name)
            continue
        if (wrapper := _wrapper(name, arguments or "", spec)) is not None:
            place, wrap = wrapper
            if not any(place in fields for fields in (written, preset, *shared)):
                wrap(None)  # refuses, unless it may stand alone
            wrappers.append(wrapper)
            continue
        fields = _parts(name, arguments or "", spec)
        if len(fields) > 1:
            shared.append(fields)
            continue
        ((place, value),) = fields.items()
        if place in written:
            raise PolicyError(
                f"policy({spec!r}) gives {place} twice: {written[place]!r} and {value!r}. Keep one of them."
            )
        written[place] = value
    for fields in shared:
        free = [p for p in fields if p not in written and (p not in preset or p == "budget")]
        if not free:
            parts = " and ".join(f"{place} by {(preset | written)[place]!r}" for place in fields)
            raise PolicyError(
                f"policy({spec!r}): {next(iter(fields.values()))!r} has no place left, {parts} are taken. "
                "Leave one of them out."
            )
        written |= {place: fields[place] for place in free}
    fields = preset | written
    for place, wrap in wrappers:
        fields[place] = wrap(fields.get(place))
    return Policy(**fields)


def _preset(name: str) -> dict[str, Any]:
    """Fields of a preset; its words are parts, never presets."""
    fields: dict[str, Any] = {}
    for word in _words(PRESETS[name]):
        part, arguments = _parse(word, name)
        if (wrapper := _wrapper(part, arguments or "", name)) is not None:
            place, wrap = wrapper
            fields[place] = wrap(fields.get(place))
        elif part != "full":
            fields |= _parts(part, arguments or "", name)
    return fields


_Wrap = Callable[[Part | None], Part]


def _wrapper(name: str, arguments: str, spec: str) -> tuple[str, _Wrap] | None:
    """Place of the wrapper of that name, and what makes it around a part; None for another word."""
    for kind in _kinds(name):
        if kind.wraps:
            values, named = _arguments(name, arguments, spec)
            if "of" in named:
                example = {"eviction": "snapkv", "storage": "int8"}[kind.place]
                raise PolicyError(
                    f"policy({spec!r}): {name} takes no argument 'of'. Write the {kind.place} before it, as "
                    f"in '{example} + {name}'."
                )
            return kind.place, functools.partial(_wrapped, kind, values, named, spec)
    return None


def _wrapped(
    kind: type[Part], values: list[Any], named: dict[str, Any], spec: str, part: Part | None
) -> Part:
    """The wrapper around a part. Where there is none, that of an eviction refuses, a storage's does not."""
    alone = part is None and kind.place == "storage"
    return _build(kind, values, named if alone else named | {"of": part}, spec)


def _words(spec: str) -> Iterator[str]:
    """The summands; a plus inside parentheses does not separate."""
    depth, start = 0, 0
    for at, letter in enumerate(spec):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            yield spec[start:at].strip()
            start = at + 1
    yield spec[start:].strip()


def _parse(word: str, spec: str) -> tuple[str, str | None]:
    """``name(arguments)`` split in two; arguments are None without parentheses."""
    match = re.fullmatch(r"([a-z][a-z0-9_-]*)\s*(?:\((.*)\))?", word, re.DOTALL)
    if not match:
        raise PolicyError(
            f"policy({spec!r}): {word!r} is not a part. Write a sum of names with arguments, such as "
            "'window(256) + sinks(4)'."
        )
    return match[1], match[2]


def _parts(name: str, arguments: str, spec: str) -> dict[str, Any]:
    """The fields of Policy that a word sets: one, or two where parts of two places share the word."""
    values, named = _arguments(name, arguments, spec)
    if name in PROTECTIONS:
        if len(values) != 1 or named:
            raise PolicyError(f"policy({spec!r}): {name} takes one number of tokens, as in {name}(4).")
        return {name: values[0]}
    kinds = _kinds(name)
    if not kinds and name in PRESETS:
        raise PolicyError(
            f"policy({spec!r}): {name} is a preset and takes no arguments. Write its parts instead, with "
            f"your arguments: '{PRESETS[name]}'."
        )
    if not kinds:
        words = {kind.name for kind in discovery.parts().values()}
        words |= {*PRESETS, *PROTECTIONS}
        close = difflib.get_close_matches(name, sorted(words), n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise PolicyError(f"policy({spec!r}): there is no {name!r}. {hint}Known: {', '.join(sorted(words))}.")
    return {kind.place: _build(kind, values, named, spec) for kind in kinds}


def _kinds(name: str) -> list[type[Part]]:
    """The parts of that name: none, one, or two of different places."""
    return [kind for kind in discovery.parts().values() if kind.name == name]


def _build(kind: type[Part], values: list[Any], named: dict[str, Any], spec: str) -> Part:
    try:
        fields = inspect.signature(kind).bind(*values, **named).arguments
    except TypeError as error:
        names = [f.name for f in dataclasses.fields(kind) if f.name != "of"]  # type: ignore[arg-type]
        takes = ", ".join(names) or "none"
        raise PolicyError(f"policy({spec!r}): {kind.name}: {error}. Its arguments: {takes}.") from None
    for name, value in fields.items():  # a part as an argument is there as text
        argument = kind.arguments.get(name)
        if isinstance(argument, OfPlace) and isinstance(value, str):
            word, arguments = _parse(value, spec)
            parts = _parts(word, arguments or "", spec)
            fields[name] = parts.get(argument.place, next(iter(parts.values())))
    try:
        part = kind(**fields)
        hash(part)  # a policy is a static argument of jit
    except TypeError as error:
        raise PolicyError(
            f"policy({spec!r}): a value for {kind.name} has a wrong type ({error}). Give numbers, words or "
            "every(k)."
        ) from None
    return part


def _arguments(name: str, text: str, spec: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("not a call")
        named = {str(k.arg): _value(k.value) for k in call.keywords}
        return [_value(x) for x in call.args], named
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(
            f"policy({spec!r}): cannot read the arguments of {name}({text}): {error}. Use numbers, words, "
            "quoted text and every(k)."
        ) from None


def _value(node: ast.expr) -> Any:
    """A literal, a bare word as text, every(k), or a part with arguments as text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        quoted = re.fullmatch(r"every\((\d+)\)", node.value)
        return Every(int(quoted[1])) if quoted else node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "every":
        return Every(*[ast.literal_eval(x) for x in node.args])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _kinds(node.func.id):
        return ast.unparse(node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is not a value") from None
