"""How a claim is judged: from rows to our number, its interval and a verdict. Nothing is typed by hand."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import catalogue
from kvjax.algebra import Policy
from kvjax.catalogue import describe
from kvjax.eval.measure.match import TOLERANCE
from kvjax.eval.measure.row import Row
from kvjax.eval.report import stats, table
from kvjax.eval.report.table import Results

HOLDS, FAILS, SILENT, NOT_RUN = "holds", "does not hold", "not informative on this model", "not run"

Wanted = Callable[[Row], bool]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Our number as text, and what it says of the claim."""

    ours: str
    verdict: str


Judge = Callable[[Results], Verdict]
NONE = Verdict("–", NOT_RUN)


def _parts(preset: str) -> frozenset[str] | None:
    """Names of the parts that a preset stands for; None where there is no such preset (yet)."""
    if preset not in catalogue.PRESETS:
        return None
    return frozenset(part["name"] for part in describe(catalogue.policy(preset))["parts"])


def only(*presets: str) -> Wanted:
    """Rows of one of these methods and nothing else; budgets and other numbers are free."""
    wanted = [parts for name in presets if (parts := _parts(name)) is not None]
    return lambda row: row.parts in wanted


def attention_free(row: Row) -> bool:
    """Rows of a preset that ranks or rejects tokens and looks at neither attention nor queries, unlearned."""
    return row.parts in _blind()


@functools.cache
def _blind() -> frozenset[frozenset[str] | None]:
    return frozenset(_parts(name) for name in catalogue.PRESETS if _ranks_blind(catalogue.policy(name)))


def _ranks_blind(policy: Policy) -> bool:
    looks = policy.needs & {"q", "q_pre", "mass"} or policy.learned
    decides = not policy.eviction.idle or policy.admission.rejects_all
    return decides and not looks


def like(preset: str, *more: str) -> Wanted:
    """Rows of this method, with these parts and perhaps others beside it."""
    wanted = _parts(preset)
    return lambda row: wanted is not None and row.parts >= wanted | set(more)


def swapped(preset: str, eviction: str) -> Wanted:
    """Rows of this method with another ranking in place of its own."""
    method = _parts(preset)
    if method is None:
        return lambda row: False
    wanted = (method - {catalogue.policy(preset).eviction.name}) | {eviction}
    return lambda row: row.parts == wanted


def on(*groups: str) -> Wanted:
    """Rows of these tasks or groups."""
    return lambda row: row.group in groups or row.cell.task in groups


def both(*tests: Wanted) -> Wanted:
    """Rows that pass all the tests."""
    return lambda row: all(test(row) for test in tests)


def elsewhere(where: str) -> Judge:
    """For claims whose quantity is in no row: not run, and where it is measured or what it would take."""
    return lambda results: Verdict("–", f"{NOT_RUN}: {where}")


def study(
    name: str, of: Callable[[dict[str, Any]], float], holds: Callable[[float], bool], how: str
) -> Judge:
    """A number that a study wrote into its JSON file, the worst over the files that are there.

    Args:
      name: of the study.
      of: its number.
      holds: what makes it the claim's.
      how: the command that writes such a file.
    """

    def judge(results: Results) -> Verdict:
        found = [of(one) for one in results.studies if one.get("study") == name]
        if not found:
            return elsewhere(how)(results)
        worst = min(found, key=lambda x: (holds(x), abs(x)))
        ours = f"{worst:.3f} (worst of {len(found)} files)"
        return Verdict(ours, HOLDS if all(map(holds, found)) else FAILS)

    return judge


def cheaper(areas: Mapping[str, Any], mine: str, others: Sequence[str]) -> float:
    """Areas of cost curves [L, K] by ranking: the best other one over mine, in the worst layer."""
    layers = {name: np.mean(areas[name], axis=1) for name in (mine, *others)}
    return float((np.min([layers[name] for name in others], axis=0) / layers[mine]).min())


def within(mine: Wanted, points: float) -> Judge:
    """The paired loss against the full cache is at most so many points, interval included."""

    def judge(results: Results) -> Verdict:
        rows = results.where(lambda row: mine(row) and row.metric != "perplexity")
        return _pooled(
            [(row, full) for row in rows if (full := results.full(row))], lambda low: low >= -points
        )

    return judge


Matched = Callable[[Row, Row], bool]


same_bytes = table.same_bytes


def same_reads(a: Row, b: Row) -> bool:
    """Tokens read per head and step within 2 %, φ counted."""
    return _near(a.reads_per_step, b.reads_per_step)


def same_slots(a: Row, b: Row) -> bool:
    """Slots read per head and step within 2 %, φ not counted."""
    return _near(a.reads.slots, b.reads.slots)


def _near(x: float, y: float) -> bool:
    return abs(x / y - 1) <= TOLERANCE


def better(
    mine: Wanted, other: Wanted, matched: Matched = same_bytes, *, margin: float = 0.0, text: bool = False
) -> Judge:
    """Paired difference of mine less other, on the same samples: its interval lies above ``margin``.

    In points, or with ``text`` in nats a token of perplexity tasks; only pairs that are ``matched``.
    """

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if (row.metric == "perplexity") == text]
        theirs = [row for row in rows if other(row)]
        pairs = [
            (a, b)
            for a in rows
            if mine(a)
            for b in theirs
            if table.samples(a) == table.samples(b) and _same_protocol(a, b) and matched(a, b)
        ]
        return _pooled(pairs, lambda low: low > margin)

    return judge


def ppl_gap(mine: Wanted, most: float) -> Judge:
    """Perplexity less the full cache's is at most ``most``, interval included; the worst cell counts."""

    def judge(results: Results) -> Verdict:
        gaps = []
        for row in results.where(lambda row: mine(row) and row.metric == "perplexity"):
            full = results.full(row)
            if full is not None:
                mean, low, high = table.loss(row, full)
                gaps.append([table.value(full) * (math.exp(-x) - 1) for x in (mean, high, low)])
        if not gaps:
            return NONE
        mean, low, high = max(gaps)
        ours = f"{mean:+.2f} PPL ({low:+.2f} … {high:+.2f}; worst of {len(gaps)} cells)"
        return Verdict(ours, HOLDS if high <= most else FAILS)

    return judge


def gap_closed(mine: Wanted, window: Wanted, least: float) -> Judge:
    """(PPL_window - PPL_mine) / (PPL_window - PPL_full) at matched bytes is at least ``least``.

    The cell with the smallest share counts, and it holds when its interval does.
    """

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if row.metric == "perplexity"]
        found = [
            share
            for a in filter(mine, rows)
            for b in filter(window, rows)
            if table.samples(a) == table.samples(b)
            and same_bytes(a, b)
            and (full := results.full(a)) is not None
            and (share := table.gap(a, b, full)) is not None
        ]
        if not found:
            return NONE
        mean, low, high = min(found)
        ours = f"{100 * mean:.0f} % ({100 * low:.0f} … {100 * high:.0f}; worst of {len(found)} cells)"
        return Verdict(ours, HOLDS if low >= least else FAILS)

    return judge


def smaller(mine: Wanted, other: Wanted, ratio: float) -> Judge:
    """At no lower score, the cheapest other one (else the full cache) holds ``ratio`` times mine's bytes.

    The interval is of the samples' bytes, cells counting by their samples; it holds when the lower end does.
    """

    def judge(results: Results) -> Verdict:
        rows = results.where(lambda row: mine(row) and row.metric != "perplexity")
        telling = [row for row in rows if row.informative]
        if not telling:
            return Verdict("–", SILENT) if rows else NONE
        own = np.concatenate([row.each.live for row in telling])
        rivals = np.concatenate([_cheapest(results, other, row) for row in telling])
        low, high = stats.spread(lambda at: rivals[at].sum(axis=1) / own[at].sum(axis=1), len(own))
        ours = f"{rivals.sum() / own.sum():.2f}× ({low:.2f} … {high:.2f}; {len(telling)} cells)"
        return Verdict(ours, HOLDS if low >= ratio else FAILS)

    return judge


def _cheapest(results: Results, other: Wanted, row: Row) -> np.ndarray:
    """Live bytes a sample of the smallest other policy of no lower score, else of the full cache."""

    def rival(found: Row) -> bool:
        as_good = (found.score or 0) >= (row.score or 0) - 0.01
        return table.samples(row) == table.samples(found) and _same_protocol(row, found) and as_good

    rivals = [found.each.live for found in results.where(other) if rival(found)]
    full = [row.bytes.full] * len(row.each.live)
    return np.asarray(min(rivals, key=sum, default=full), float)


def _same_protocol(a: Row, b: Row) -> bool:
    protocols = {a.cell.protocol, b.cell.protocol} - {"either"}
    return len(protocols) < 2


def _pooled(pairs: list[tuple[Row, Row]], holds: Callable[[float], bool]) -> Verdict:
    """Mean difference over informative pairs, cells counting by their samples."""
    if not pairs:
        return NONE
    telling = [(a, b) for a, b in pairs if a.informative]
    if not telling:
        return Verdict("–", SILENT)
    text = telling[0][0].metric == "perplexity"
    scale, unit, digits = (1, "nats a token", 3) if text else (100, "points", 1)
    mine = [scale * x for a, _ in telling for x in table.quality(a)]
    other = [scale * x for _, b in telling for x in table.quality(b)]
    tokens = [n for a, _ in telling for n in a.each.tokens] if text else None
    found = stats.difference(mine, other, tokens)
    mean, low, high = (f"{x:+.{digits}f}" for x in found)
    ours = f"{mean} {unit} ({low} … {high}; {len(telling)} cells, n = {len(mine)})"
    return Verdict(ours, HOLDS if holds(found[1]) else FAILS)
