"""How a claim is judged: from rows to our number, its interval and a verdict. Nothing is typed by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from kvjax.eval import stats, table
from kvjax.eval.match import TOLERANCE
from kvjax.eval.store import Row
from kvjax.eval.table import Results

HOLDS, FAILS, SILENT, NOT_RUN = "holds", "does not hold", "not informative on this model", "not run"

Wanted = Callable[[Row], bool]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Our number as text, and what it says of the claim."""

    ours: str
    verdict: str


Judge = Callable[[Results], Verdict]
NONE = Verdict("–", NOT_RUN)


def uses(*words: str, without: tuple[str, ...] = ()) -> Wanted:
    """Rows whose policy has all these parts and none of those."""

    def test(row: Row) -> bool:
        has = set(re.findall(r"(?:^|\+ )([a-z][a-z0-9_-]*)", row["cell"]["policy"]))
        return all(word in has for word in words) and not has & set(without)

    return test


def either(*tests: Wanted) -> Wanted:
    """Rows that pass any of the tests."""
    return lambda row: any(test(row) for test in tests)


def on(*groups: str) -> Wanted:
    """Rows of these tasks or groups."""
    return lambda row: row["group"] in groups or row["cell"]["task"] in groups


def both(*tests: Wanted) -> Wanted:
    """Rows that pass all the tests."""
    return lambda row: all(test(row) for test in tests)


def never(results: Results) -> Verdict:
    """For claims whose quantity is not in result rows yet."""
    del results
    return NONE


def within(mine: Wanted, points: float) -> Judge:
    """The paired loss against the full cache is at most so many points, interval included."""

    def judge(results: Results) -> Verdict:
        rows = results.where(lambda row: mine(row) and row["metric"] != "perplexity")
        return _pooled(
            [(row, full) for row in rows if (full := results.full(row))], lambda low: low >= -points
        )

    return judge


def better(
    mine: Wanted, other: Wanted, *, matched: bool = True, margin: float = 0.0, text: bool = False
) -> Judge:
    """Paired difference of mine less other, on the same samples: its interval lies above ``margin``.

    In points, or with ``text`` in nats a token of perplexity tasks. With ``matched``, only pairs of live
    bytes within 2 %.
    """

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if (row["metric"] == "perplexity") == text]
        pairs = [
            (a, b)
            for a in rows
            if mine(a)
            for b in rows
            if other(b) and table.samples(a) == table.samples(b) and _same_protocol(a, b)
            and (not matched or _same_bytes(a, b))
        ]  # fmt: skip
        return _pooled(pairs, lambda low: low > margin)

    return judge


def ppl_gap(mine: Wanted, most: float) -> Judge:
    """Perplexity less the full cache's is at most ``most``; the worst cell counts."""

    def judge(results: Results) -> Verdict:
        gaps = []
        for row in results.where(lambda row: mine(row) and row["metric"] == "perplexity"):
            full = results.full(row)
            if full is not None:
                mean, low, high = table.loss(row, full)
                gaps.append([full["perplexity"] * (math.exp(-x) - 1) for x in (mean, high, low)])
        if not gaps:
            return NONE
        mean, low, high = max(gaps)
        return Verdict(f"{mean:+.2f} PPL ({low:+.2f} … {high:+.2f})", HOLDS if mean <= most else FAILS)

    return judge


def gap_closed(mine: Wanted, window: Wanted, least: float) -> Judge:
    """(PPL_window - PPL_mine) / (PPL_window - PPL_full) at matched bytes is at least ``least``."""

    def judge(results: Results) -> Verdict:
        rows = [row for row in results.rows if row["metric"] == "perplexity"]
        shares = []
        for a in filter(mine, rows):
            for b in filter(window, rows):
                full = results.full(a)
                if full is None or table.samples(a) != table.samples(b) or not _same_bytes(a, b):
                    continue
                whole = b["perplexity"] - full["perplexity"]
                if whole > 0:
                    shares.append((b["perplexity"] - a["perplexity"]) / whole)
        if not shares:
            return NONE
        mean = sum(shares) / len(shares)
        return Verdict(f"{100 * mean:.0f} %", HOLDS if mean >= least else FAILS)

    return judge


def smaller(mine: Wanted, other: Wanted, ratio: float) -> Judge:
    """At no lower score, mine holds at most 1 / ``ratio`` of the bytes of the cheapest other one."""

    def judge(results: Results) -> Verdict:
        found, silent = [], 0
        for a in results.where(mine):
            if a["metric"] == "perplexity":
                continue
            if not a["informative"]:
                silent += 1
                continue
            rivals = [
                b["bytes"]["live"]
                for b in results.where(other)
                if table.samples(a) == table.samples(b) and b["score"] >= a["score"] - 0.01
            ]
            found.append((min(rivals) if rivals else a["bytes"]["full"]) / a["bytes"]["live"])
        if not found:
            return Verdict("–", SILENT) if silent else NONE
        mean = sum(found) / len(found)
        return Verdict(f"{mean:.2f}× ({len(found)} cells)", HOLDS if mean >= ratio else FAILS)

    return judge


def _same_bytes(a: Row, b: Row) -> bool:
    return abs(a["bytes"]["peak_live"] / b["bytes"]["peak_live"] - 1) <= TOLERANCE


def _same_protocol(a: Row, b: Row) -> bool:
    said = {a["cell"]["protocol"], b["cell"]["protocol"]} - {"either"}
    return len(said) < 2


def _pooled(pairs: list[tuple[Row, Row]], holds: Callable[[float], bool]) -> Verdict:
    """Mean difference over informative pairs, cells counting by their samples."""
    if not pairs:
        return NONE
    telling = [(a, b) for a, b in pairs if a["informative"]]
    if not telling:
        return Verdict("–", SILENT)
    text = telling[0][0]["metric"] == "perplexity"
    scale, unit, digits = (1, "nats a token", 3) if text else (100, "points", 1)
    mine = [scale * x for a, _ in telling for x in table.quality(a)]
    other = [scale * x for _, b in telling for x in table.quality(b)]
    tokens = [n for a, _ in telling for n in a["each"]["tokens"]] if text else None
    found = stats.difference(mine, other, tokens)
    mean, low, high = (f"{x:+.{digits}f}" for x in found)
    said = f"{mean} {unit} ({low} … {high}; {len(telling)} cells, n = {len(mine)})"
    return Verdict(said, HOLDS if holds(found[1]) else FAILS)
