"""One method over several lengths: the rows that a reader takes for one, whatever their budgets."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvjax.algebra import PLACES
from kvjax.catalogue import opened
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.report import table


def methods(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by method, under one name each, in order of appearance.

    Budgets often follow the length, and every length then has policies of its own. A policy that is there at
    one length only is joined with those of other lengths that have the same parts; of several at one length
    the first with the first, the second with the second.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(table.name(row), []).append(row)
    groups: dict[tuple[Hashable, int], list[str]] = {}
    seen: collections.Counter[Hashable] = collections.Counter()
    for name, mine in found.items():
        lengths = {row.cell.length for row in mine}
        if len(lengths) > 1:
            groups[name, 0] = [name]
            continue
        at = _alike(mine[0]), lengths.pop()
        groups.setdefault((at[0], seen[at]), []).append(name)
        seen[at] += 1
    return {
        names[0] if len(names) == 1 else label([found[name][0] for name in names]): [
            row for name in names for row in found[name]
        ]
        for names in groups.values()
    }


def _alike(row: Row) -> Hashable:
    """What policies of one method share: parts, protections, learned weights, protocol; numbers are free."""
    policy = row.policy
    return row.parts, bool(policy["sinks"]), bool(policy["recent"]), row.cell.weights, row.cell.protocol


def label(rows: list[Row]) -> str:
    """The policies' one-string form, the fields that differ left open."""
    policies = [parse_policy(row.cell.policy) for row in rows]
    fields = {place: _differing([getattr(policy, place) for policy in policies]) for place in PLACES}
    own = [name for name in _differing(policies) if name not in PLACES]
    return table.named(opened(policies[0], fields | {"": own}), rows[0])


def _differing(values: Sequence[Any]) -> list[str]:
    """Fields in which dataclasses of one kind differ."""
    names = [field.name for field in dataclasses.fields(values[0])]
    return [name for name in names if len({getattr(value, name) for value in values}) > 1]
