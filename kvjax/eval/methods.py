"""One method over several lengths: the rows that a reader takes for one, whatever their budgets."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

from kvjax.eval import table
from kvjax.eval.store import Row

NUMBER = re.compile(r"(?<![\w.])[\d.]+")


def methods(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by method, under one name each, in order of appearance.

    Budgets often follow the length, and every length then has policies of its own. A policy that is there at
    one length only is joined with those of other lengths that have the same parts; of several at one length
    the first with the first, the second with the second.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(table.name(row), []).append(row)
    groups: dict[tuple[str, int], list[str]] = {}
    seen: collections.Counter[tuple[str, int]] = collections.Counter()
    for name, mine in found.items():
        lengths = {row["cell"]["length"] for row in mine}
        if len(lengths) > 1:
            groups[name, 0] = [name]
            continue
        at = parts(name), lengths.pop()
        groups.setdefault((at[0], seen[at]), []).append(name)
        seen[at] += 1
    return {label(names): [row for name in names for row in found[name]] for names in groups.values()}


def parts(name: str) -> str:
    """A name without what stands in brackets."""
    return re.sub(r"\([^()]*\)", "", name)


def label(names: list[str]) -> str:
    """What the names share: numbers that differ become dots; where more differs, the parts alone."""
    if len({NUMBER.sub("", name) for name in names}) > 1:
        return parts(names[0])
    numbers = zip(*(NUMBER.findall(name) for name in names))
    said = iter([each[0] if len(set(each)) == 1 else "…" for each in numbers])
    return NUMBER.sub(lambda _: next(said), names[0])
