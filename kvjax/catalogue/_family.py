"""A policy field by field, and its family: the same method at other budgets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from kvjax.algebra import PLACES, Part, Policy, PolicyError
from kvjax.budgets import amount as amounts

Value = TypeVar("Value", Part, Policy)


class _Open:
    """Stands for a value that is left open."""

    def __repr__(self) -> str:
        return "…"


def family(policy: Policy) -> str:
    """The policy with the numbers left open that say how much; policies of one family differ in them alone.

    ``snapkv + uniform(0.25)`` and ``snapkv + uniform(64)`` are both ``snapkv(32) + uniform(…)``.
    """
    return opened(policy, {part.place: sizes(part) for part in policy.parts})


def sizes(part: Part) -> tuple[str, ...]:
    """The fields that say how much a part keeps or reads; of a budget that names none, the first field."""
    if part.sizes or part.place != "budget":
        return part.sizes
    return tuple(field.name for field in dataclasses.fields(part)[:1])  # type: ignore[arg-type]


def opened(policy: Policy, fields: Mapping[str, Collection[str]]) -> str:
    """The one-string form with some values left open.

    Args:
      policy: whose.
      fields: names of the fields to leave open, by place; those of the policy itself (sinks, recent) by "".
    """
    own = {place: _without(getattr(policy, place), fields.get(place, ())) for place in PLACES}
    return repr(_with(policy, own | dict.fromkeys(fields.get("", ()), _Open())))


def _without(part: Part, names: Collection[str]) -> Part:
    return _with(part, dict.fromkeys(names, _Open()))


def _with(value: Value, fields: Mapping[str, Any]) -> Value:
    """A copy that is only printed: nothing checks it."""
    made = copy.copy(value)
    for name, content in fields.items():
        object.__setattr__(made, name, content)
    return made


def describe(policy: Policy) -> dict[str, Any]:
    """The policy as JSON, so that whoever reads results need not parse its name.

    Returns:
      policy: the one-string form, which parses back.
      parts: place, name and arguments of each part that does something.
      sinks, recent: the protections.
      family: as ``family`` has it.
      size: of each field that says how much the budget keeps, its number and unit ("tokens" a stream, "ratio"
        of the tokens seen, "bytes" of a row); {} without a budget, or where the prompt says how much.
    """
    budget, busy = policy.budget, [part for part in policy.parts if not part.idle]
    amounts_of = () if budget.voted else sizes(budget)
    return {
        "policy": repr(policy),
        "parts": [{"place": part.place, "name": part.name, "args": _arguments(part)} for part in busy],
        "sinks": policy.sinks,
        "recent": policy.recent,
        "family": family(policy),
        "size": {name: size for name in amounts_of if (size := _size(getattr(budget, name)))},
    }


def _size(value: Any) -> dict[str, Any] | None:
    """An amount as number and unit; None for what is no amount."""
    try:
        amounts.Size().check("", "", value)
    except PolicyError:
        return None
    limit = amounts.limit(value)
    return {"number": limit.number, "unit": limit.unit}


def _arguments(part: Part) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
