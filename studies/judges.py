"""How a claim is judged: from rows to our number, its interval and a verdict."""

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
from kvjax.eval.report.table import Results, same_bytes

HOLDS, FAILS, SILENT, NOT_RUN = "holds", "does not hold", "not informative on this model", "not run"


@dataclasses.dataclass(frozen=True)
class Evidence(Results):
    """Rows, and the JSON objects that studies wrote (those with a "study")."""

    studies: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Our number as text, and what it says of the claim."""

    ours: str
    verdict: str


RowTest = Callable[[Row], bool]
PairTest = Callable[[Row, Row], bool]
Judge = Callable[[Results], Verdict]
NONE = Verdict("–", NOT_RUN)


# --- which rows -----------------------------------------------------------------------------------


def _parts(preset: str) -> frozenset[str] | None:
    """Names of the parts that a preset stands for; None where there is no such preset."""
    if preset not in catalogue.PRESETS:
        return None
    return frozenset(part["name"] for part in describe(catalogue.policy(preset))["parts"])


def only(*presets: str) -> RowTest:
    """Rows of one of these methods and nothing else; budgets and other numbers are free."""
    wanted = [parts for name in presets if (parts := _parts(name)) is not None]
    return lambda row: row.parts in wanted


def attention_free(row: Row) -> bool:
    """Rows of a preset that ranks or rejects tokens without attention, queries or learned weights."""
    return row.parts in _attention_free_parts()


@functools.cache
def _attention_free_parts() -> frozenset[frozenset[str] | None]:
    def fits(policy: Policy) -> bool:
        decides = not policy.eviction.idle or policy.admission.rejects_all
        attends = policy.eviction.replays or policy.needs & {"q", "q_pre", "mass"}
        return decides and not attends and not policy.learned

    return frozenset(_parts(name) for name in catalogue.PRESETS if fits(catalogue.policy(name)))


OWN = ("wg-kv", "conf-kv", "conf-kv-l", "kvp", "topk-phi", "gvote")
"""Presets of the five papers' own methods."""


def baseline(row: Row) -> bool:
    """Rows of a method that is none of the five papers' own and not the full cache."""
    return row.parts in _baseline_parts()


@functools.cache
def _baseline_parts() -> frozenset[frozenset[str] | None]:
    others = {_parts(name) for name in catalogue.PRESETS if name not in OWN}
    return frozenset(others - {_parts(name) for name in (*OWN, table.FULL)})


def like(preset: str, *more: str) -> RowTest:
    """Rows of this method with these parts, and perhaps others."""
    wanted = _parts(preset)
    return lambda row: wanted is not None and row.parts >= wanted | set(more)


def swapped(preset: str, eviction: str) -> RowTest:
    """Rows of this method with another ranking in place of its own."""
    method = _parts(preset)
    if method is None:
        return lambda row: False
    wanted = (method - {catalogue.policy(preset).eviction.name}) | {eviction}
    return lambda row: row.parts == wanted


def on(*groups: str) -> RowTest:
    """Rows of these tasks or groups."""
    return lambda row: row.group in groups or row.cell.task in groups


def both(*tests: RowTest) -> RowTest:
    """Rows that pass all the tests."""
    return lambda row: all(test(row) for test in tests)


def same_reads(a: Row, b: Row) -> bool:
    """Tokens read per head and step are within 2 %, φ counted."""
    return abs(a.reads_per_step / b.reads_per_step - 1) <= TOLERANCE


def same_slots(a: Row, b: Row) -> bool:
    """Slots read per head and step are within 2 %, φ not counted."""
    return abs(a.reads.slots / b.reads.slots - 1) <= TOLERANCE


def _same_samples(a: Row, b: Row) -> bool:
    protocols = {a.cell.protocol, b.cell.protocol} - {"either"}
    return a.cell.drawn == b.cell.drawn and len(protocols) < 2


# --- judges ---------------------------------------------------------------------------------------


def elsewhere(where: str) -> Judge:
    """Of a quantity that is in no row: not run, and where it is measured or what it would take."""
    return lambda results: Verdict("–", f"{NOT_RUN}: {where}")


def study(
    name: str, number: Callable[[dict[str, Any]], float], holds: Callable[[float], bool], command: str
) -> Judge:
    """A number from a study's JSON files; the worst of them counts.

    Args:
      name: of the study.
      number: from the JSON object to the number.
      holds: whether the claim holds with that number.
      command: writes such a file.
    """

    def judge(results: Results) -> Verdict:
        studies = results.studies if isinstance(results, Evidence) else ()
        numbers = [number(tree) for tree in studies if tree["study"] == name]
        if not numbers:
            return elsewhere(command)(results)
        worst = min(numbers, key=lambda x: (holds(x), abs(x)))
        ours = f"{worst:.3f} (worst of {len(numbers)} files)"
        return Verdict(ours, HOLDS if all(map(holds, numbers)) else FAILS)

    return judge


def cheaper(areas: Mapping[str, Any], ranking: str, others: Sequence[str]) -> float:
    """Areas of cost curves [L, K] by ranking: the best of the others over this one, in the worst layer."""
    layers = {name: np.mean(areas[name], axis=1) for name in (ranking, *others)}
    return float((np.min([layers[name] for name in others], axis=0) / layers[ranking]).min())


def within(method: RowTest, points: float) -> Judge:
    """The paired loss against the full cache is at most so many points, interval included."""

    def judge(results: Results) -> Verdict:
        rows = results.where(lambda row: method(row) and row.metric != "perplexity")
        pairs = [(row, full) for row in rows if (full := results.full(row))]
        return _pooled(pairs, lambda low: low >= -points)

    return judge


def better(
    method: RowTest,
    rival: RowTest,
    matched: PairTest = same_bytes,
    *,
    margin: float = 0.0,
    text: bool = False,
) -> Judge:
    """Paired difference of method less rival, on the same samples: its interval lies above ``margin``.

    Of each cell the best rival counts, and beside it the best baseline of all, where that is another row. In
    points, or with ``text`` in nats a token of perplexity tasks; only pairs that are ``matched``. The best of
    several noisy rows is a little better than it is on fresh samples: the difference errs against the method.
    """

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if (row.metric == "perplexity") == text]
        own = [row for row in rows if method(row)]
        named = best_rivals(own, [row for row in rows if rival(row)], matched)
        verdict = _pooled(named, lambda low: low > margin)
        others = [row for row in rows if rival(row) or (baseline(row) and not method(row))]
        every = best_rivals(own, others, matched)
        if verdict.verdict not in (HOLDS, FAILS) or every == named:
            return verdict
        hardest = _pooled(every, lambda low: low > margin)
        fails = verdict.verdict == HOLDS and hardest.verdict == FAILS
        return Verdict(
            f"{verdict.ours}; against the best baseline {hardest.ours}",
            f"{HOLDS}, against the best baseline it does not" if fails else verdict.verdict,
        )

    return judge


def best_rivals(own: Sequence[Row], rivals: Sequence[Row], matched: PairTest) -> list[tuple[Row, Row]]:
    """Each row with the best of the rivals that are matched to it on the same samples, if there are any."""
    pairs = []
    for row in own:
        there = [other for other in rivals if _same_samples(row, other) and matched(row, other)]
        if there:
            pairs.append((row, max(there, key=_quality)))
    return pairs


def _quality(row: Row) -> float:
    """The number that is compared between policies, higher is better."""
    return -table.value(row) if row.metric == "perplexity" else table.value(row)


def ppl_gap(method: RowTest, most: float) -> Judge:
    """Perplexity less the full cache's is at most ``most``, interval included; the worst cell counts."""

    def judge(results: Results) -> Verdict:
        gaps = []
        for row in results.where(lambda row: method(row) and row.metric == "perplexity"):
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


def gap_closed(method: RowTest, window: RowTest, least: float) -> Judge:
    """(PPL_window - PPL_method) / (PPL_window - PPL_full) at matched bytes is at least ``least``.

    The cell with the smallest share counts, interval included.
    """

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if row.metric == "perplexity"]
        shares = [
            share
            for a in filter(method, rows)
            for b in filter(window, rows)
            if a.cell.drawn == b.cell.drawn
            and same_bytes(a, b)
            and (full := results.full(a)) is not None
            and (share := table.gap(a, b, full)) is not None
        ]
        if not shares:
            return NONE
        mean, low, high = min(shares)
        ours = f"{100 * mean:.0f} % ({100 * low:.0f} … {100 * high:.0f}; worst of {len(shares)} cells)"
        return Verdict(ours, HOLDS if low >= least else FAILS)

    return judge


def smaller(method: RowTest, rival: RowTest, ratio: float) -> Judge:
    """The cheapest rival of no lower score (else the full cache) holds ``ratio`` times the method's bytes.

    The interval is of the samples' bytes, cells counting by their samples; its lower end counts.
    """

    def judge(results: Results) -> Verdict:
        rows = results.where(lambda row: method(row) and row.metric != "perplexity")
        informative = [row for row in rows if row.informative]
        if not informative:
            return Verdict("–", SILENT) if rows else NONE
        own = np.concatenate([row.each.live for row in informative])
        rivals = np.concatenate([_cheapest(results, rival, row) for row in informative])
        low, high = stats.spread(lambda at: rivals[at].sum(axis=1) / own[at].sum(axis=1), len(own))
        ours = f"{rivals.sum() / own.sum():.2f}× ({low:.2f} … {high:.2f}; {len(informative)} cells)"
        return Verdict(ours, HOLDS if low >= ratio else FAILS)

    return judge


def _cheapest(results: Results, rival: RowTest, row: Row) -> np.ndarray:
    """Live bytes a sample of the smallest rival of no lower score, else of the full cache."""
    least = (row.score or 0) - 0.01
    rivals = [
        other.each.live
        for other in results.where(rival)
        if _same_samples(row, other) and (other.score or 0) >= least
    ]
    return np.asarray(min(rivals, key=sum, default=[row.bytes.full] * len(row.each.live)), float)


def _pooled(pairs: list[tuple[Row, Row]], holds: Callable[[float], bool]) -> Verdict:
    """Mean difference over informative pairs, cells counting by their samples."""
    if not pairs:
        return NONE
    informative = [(a, b) for a, b in pairs if a.informative]
    if not informative:
        return Verdict("–", SILENT)
    text = informative[0][0].metric == "perplexity"
    scale, unit, digits = (1, "nats a token", 3) if text else (100, "points", 1)
    own = [scale * x for a, _ in informative for x in table.quality(a)]
    rival = [scale * x for _, b in informative for x in table.quality(b)]
    tokens = [n for a, _ in informative for n in a.each.tokens] if text else None
    interval = stats.difference(own, rival, tokens)
    mean, low, high = (f"{x:+.{digits}f}" for x in interval)
    top = sum(_quality(a) >= _quality(b) for a, b in informative)
    tasks = {a.cell.task for a, _ in informative}
    alone = f"; one task, {tasks.pop()}" if len(tasks) == 1 else ""
    cells = f"{len(informative)} cells, not behind in {top}, n = {len(own)}{alone}"
    return Verdict(f"{mean} {unit} ({low} … {high}; {cells})", HOLDS if holds(interval[1]) else FAILS)
