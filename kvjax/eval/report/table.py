"""Rows as tables: looked up by cell, written as Markdown."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.eval.measure.match import TOLERANCE
from kvjax.eval.measure.row import Row
from kvjax.eval.report import stats
from kvjax.eval.tasks import ORDER

FULL = "full"


def samples(row: Row) -> tuple[str, int, int, int]:
    """Which samples a row is about: what two rows must share to be paired."""
    return row.cell.drawn


def name(row: Row) -> str:
    """Policy, its learned weights and its protocol, as tables show them."""
    return named(row.cell.policy, row)


def named(policy: str, row: Row) -> str:
    """The same with another word for the policy."""
    weights = re.sub("@[0-9a-f]+", "", row.cell.weights)
    return _asked(f"{policy} [{weights}]" if weights else policy, row)


def family(row: Row) -> str:
    """What the rows of one curve share: the method, whatever its budget and its weights, and the protocol."""
    return _asked(row.policy["family"], row)


def _asked(policy: str, row: Row) -> str:
    return policy if row.cell.protocol == "either" else f"{policy}, {row.cell.protocol}"


def quality(row: Row) -> list[float]:
    """Per sample, higher is better: the score, or minus the NLL where tokens are judged."""
    if row.metric == "perplexity":
        return [-value for value in row.each.nll]
    return list(row.each.score)


def weights(row: Row) -> list[int] | None:
    """Tokens, where samples are to count by them."""
    return row.each.tokens if row.metric == "perplexity" else None


def value(row: Row) -> float:
    """The number a table shows: percent, or perplexity."""
    shown = row.perplexity if row.metric == "perplexity" else row.score
    assert shown is not None  # noqa: S101  (a row has the one or the other)
    return shown if row.metric == "perplexity" else 100 * shown


def loss(row: Row, full: Row) -> tuple[float, float, float]:
    """Quality less the full cache's on the same samples, with its interval."""
    return stats.difference(quality(row), quality(full), weights(row))


def share(results: Results, row: Row) -> float:
    """Live bytes at their highest while answering, over the full cache's on the same samples."""
    full = results.full(row)
    whole = row.bytes.full if full is None else full.bytes.peak_live
    return float(row.bytes.peak_live / whole)


def same_bytes(a: Row, b: Row) -> bool:
    """Live bytes, at their highest while answering, within 2 %: the rule by which memory is matched."""
    return bool(abs(a.bytes.peak_live / b.bytes.peak_live - 1) <= TOLERANCE)


def gap(mine: Row, window: Row, full: Row) -> tuple[float, float, float] | None:
    """Share of the perplexity between window and full that mine closes; None where there is none."""
    tokens = np.asarray(full.each.tokens, float)
    nats = [np.asarray(row.each.nll, float) * tokens for row in (mine, window, full)]

    def of(at: np.ndarray) -> np.ndarray:
        ppl, least, most = (np.exp(x[at].sum(axis=-1) / tokens[at].sum(axis=-1)) for x in nats)
        return np.asarray((least - ppl) / np.where(least > most, least - most, np.nan))

    mean = float(of(np.arange(len(tokens))))
    return None if math.isnan(mean) else (mean, *stats.spread(of, len(tokens)))


@dataclasses.dataclass(frozen=True)
class Results:
    """Rows of one or more folders.

    Attributes:
      rows: in order.
      studies: what studies wrote (JSON objects with a "study"), for claims.
    """

    rows: tuple[Row, ...]
    studies: tuple[dict[str, Any], ...] = ()

    def where(self, test: Callable[[Row], bool]) -> list[Row]:
        """The rows that pass."""
        return [row for row in self.rows if test(row)]

    def full(self, row: Row) -> Row | None:
        """The full cache on the same samples."""
        return next((r for r in self.rows if r.cell.policy == FULL and samples(r) == samples(row)), None)

    def columns(self) -> list[tuple[str, str, int]]:
        """(group, task, length), in the order of groups."""
        found = dict.fromkeys((r.group, r.cell.task, r.cell.length) for r in self.rows)
        return sorted(found, key=lambda column: (ORDER.index(column[0]), column[2]))

    def names(self) -> list[str]:
        """Policies with their protocols, as they first stand; the full cache first."""
        found = dict.fromkeys(name(row) for row in self.rows)
        return sorted(found, key=lambda n: n != FULL)


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    shown = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in shown)


def pooled(rows: list[Row]) -> tuple[float, float, float]:
    """The shown number with its interval, seeds taken together."""
    values = [q for row in rows for q in quality(row)]
    if rows[0].metric == "perplexity":
        mean, low, high = stats.interval(values, [w for row in rows for w in weights(row) or []])
        return math.exp(-mean), math.exp(-high), math.exp(-low)
    mean, low, high = stats.interval(values)
    return 100 * mean, 100 * low, 100 * high


def scores(results: Results, group: str) -> str:
    """One group's tasks: policies down, tasks and lengths across; * marks cells that say nothing."""
    columns = [column for column in results.columns() if column[0] == group]
    lines = []
    for policy in results.names():
        line = [f"`{policy}`"]
        for _, task, length in columns:
            rows = [r for r in results.rows if name(r) == policy and samples(r)[:2] == (task, length)]
            if not rows:
                line.append("–")
                continue
            mean, low, high = pooled(rows)
            mark = "" if all(r.informative for r in rows) else "\\*"
            line.append(f"{mean:.1f}{mark} ({low:.1f}–{high:.1f})")
        if len(set(line[1:])) > 1 or line[1] != "–":
            lines.append(line)
    heads = ["policy", *(f"{task} {length}{_unit(results, task)}" for _, task, length in columns)]
    return markdown(heads, lines)


def _unit(results: Results, task: str) -> str:
    metric = next(r.metric for r in results.rows if r.cell.task == task)
    return {"perplexity": ", ppl", "ndcg": ", NDCG", "recall": ", recall"}.get(metric, ", %")


def costs(results: Results) -> str:
    """What each policy held and read, by length; means over tasks."""
    lines = []
    for policy in results.names():
        for length in sorted({row.cell.length for row in results.rows}):
            rows = [r for r in results.rows if name(r) == policy and r.cell.length == length]
            if rows:
                lines.append([f"`{policy}`", length, *_cost(rows)])
    heads = ["policy", "length", "kept %", "peak %", "mean %", "live KiB", "allocated KiB",
             "peak allocated KiB", "full KiB", "reads a step", "φ in it", "to choose them",
             "spans kept %", "compressed at", "prefill"]  # fmt: skip
    return markdown(heads, lines)


def _cost(rows: list[Row]) -> list[str]:
    def mean(of: Callable[[Row], float | None], scale: float = 1.0) -> str:
        there = [x for x in map(of, rows) if x is not None]
        return f"{scale * sum(there) / len(there):.1f}" if there else "–"

    switch = rows[0].switches
    return [
        mean(lambda r: r.kept_fraction, 100),
        mean(lambda r: r.peak_fraction, 100),
        mean(lambda r: r.mean_fraction, 100),
        mean(lambda r: r.bytes.live, 1 / 1024),
        mean(lambda r: r.bytes.allocated, 1 / 1024),
        mean(lambda r: r.bytes.peak_allocated, 1 / 1024),
        mean(lambda r: r.bytes.full, 1 / 1024),
        mean(lambda r: r.reads_per_step),
        mean(lambda r: r.reads.summary),
        mean(lambda r: r.reads.selector),
        mean(lambda r: r.span_retention, 100),
        switch.compress_at,
        switch.prefill_attention,
    ]


def losses(results: Results) -> str:
    """Difference from the full cache, paired, in points or nats a token; only informative cells."""
    lines = []
    for row in results.rows:
        full = results.full(row)
        if full is None or row is full or not row.informative:
            continue
        mean, low, high = loss(row, full)
        scale, unit = (1, "nats") if row.metric == "perplexity" else (100, "points")
        held = row.bytes.live / row.bytes.full
        cell = row.cell
        lines.append(
            [f"`{name(row)}`", cell.task, cell.length, cell.seed, f"{scale * mean:+.2f}",
             f"{scale * low:+.2f} … {scale * high:+.2f}", unit, f"{100 * held:.1f}"]
        )  # fmt: skip
    if not lines:
        return "No cell is informative and has another policy beside the full cache."
    heads = ["policy", "task", "length", "seed", "difference", "95 % (paired)", "in", "live % of full"]
    return markdown(heads, lines)


def matched(results: Results) -> str:
    """A learned policy less another one that holds the same bytes, paired; only informative cells."""
    lines = []
    for at, mine in enumerate(results.rows):
        # Of two learned policies the one that stands first.
        others = [b for i, b in enumerate(results.rows) if not b.cell.weights or i > at]
        for other in others if mine.cell.weights and mine.informative else []:
            if _comparable(mine, other):
                lines.append(_pair(results, mine, other))
    heads = ["policy", "against", "task", "length", "n", "live % of full", "score", "difference",
             "95 % (paired)", "in"]  # fmt: skip
    return markdown(heads, lines) if lines else ""


def _comparable(mine: Row, other: Row) -> bool:
    """Other methods on the same samples, at matched memory."""
    protocols = {row.cell.protocol for row in (mine, other)} - {"either"}
    apart = family(mine) != family(other)
    return apart and len(protocols) < 2 and samples(mine) == samples(other) and same_bytes(mine, other)


def _pair(results: Results, mine: Row, other: Row) -> list[str]:
    difference = stats.difference(quality(mine), quality(other), weights(mine))
    text = mine.metric == "perplexity"
    mean, low, high = (f"{(1 if text else 100) * x:+.{3 if text else 1}f}" for x in difference)
    cell, both = mine.cell, (mine, other)
    return [
        f"`{name(mine)}`", f"`{name(other)}`", cell.task, str(cell.length), str(cell.samples),
        " / ".join(f"{100 * share(results, row):.1f}" for row in both),
        " / ".join(f"{value(row):.1f}" for row in both),
        mean, f"{low} … {high}", "nats a token" if text else "points",
    ]  # fmt: skip
