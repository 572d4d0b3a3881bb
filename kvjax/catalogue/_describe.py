"""A policy as JSON, and its family: the same method at other budgets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from kvjax.algebra import Part, Policy, PolicyError
from kvjax.budgets import amount as amounts

Value = TypeVar("Value", Part, Policy)


class _Open:
    """Prints as a value that is left open; also in the place of an eviction that a wrapper holds."""

    word = "…"

    @property
    def chain(self) -> tuple[_Open, ...]:
        return (self,)

    def __repr__(self) -> str:
        return "…"


def family(policy: Policy) -> str:
    """The policy without the numbers that say how much is kept or read: a family differs in those only.

    ``snapkv + uniform(0.25)`` and ``snapkv + uniform(64)`` are both ``snapkv(32) + uniform(…)``.
    """
    return opened(policy, {part.place: sizes(part) for part in policy.parts})


def sizes(part: Part) -> tuple[str, ...]:
    """The fields that say how much a part keeps or reads; for a budget that names none, the first field."""
    if part.sizes or part.place != "budget":
        return part.sizes
    return tuple(field.name for field in dataclasses.fields(part)[:1])  # type: ignore[arg-type]


def opened(policy: Policy, fields: Mapping[str, Collection[str]]) -> str:
    """The one-string form with some values left open.

    Args:
      policy: the policy.
      fields: names of the fields to leave open, by place; "" for those of the policy itself (sinks, recent).
    """
    parts = {
        part.place: _with(part, dict.fromkeys(fields.get(part.place, ()), _Open())) for part in policy.parts
    }
    return repr(_with(policy, parts | dict.fromkeys(fields.get("", ()), _Open())))


def _with(value: Value, fields: Mapping[str, Any]) -> Value:
    """An unchecked copy, for printing only."""
    result = copy.copy(value)
    for name, content in fields.items():
        object.__setattr__(result, name, content)
    return result


def describe(policy: Policy) -> dict[str, Any]:
    """The policy as JSON, so that readers of results need not parse its name.

    Returns:
      policy: the one-string form, which parses back.
      parts: place, name and arguments of each part that does something; a wrapper follows what it holds.
      sinks, recent: the protections.
      family: as ``family`` returns it.
      size: number and unit ("tokens" per KV head, "ratio" of the tokens seen, "bytes" of a row) of each field
        that says how much the budget keeps; {} without a budget, or where the prompt decides how much.
    """
    budget, busy = policy.budget, [part for part in policy.chain if not part.idle]
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
    """An amount as number and unit; None for other values."""
    try:
        amounts.Size().check("", "", value)
    except PolicyError:
        return None
    return dataclasses.asdict(amounts.limit(value))


def _arguments(part: Part) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    names = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    values = {name: getattr(part, name) for name in names}
    return {
        name: value if isinstance(value, plain) else repr(value)
        for name, value in values.items()
        if name != "of"  # what it holds stands before it
    }
