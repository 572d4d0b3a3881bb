"""Rows as tables: looked up by cell, written as Markdown."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.eval.measure.match import TOLERANCE
from kvjax.eval.measure.protocol import LONG
from kvjax.eval.measure.row import Row
from kvjax.eval.report import stats
from kvjax.eval.tasks import ORDER

FULL = "full"


def name(row: Row) -> str:
    """Policy, its learned weights and its protocol, as tables show them."""
    return named(row.cell.policy, row)


def named(policy: str, row: Row) -> str:
    """The same with another name for the policy."""
    weights = re.sub("@[0-9a-f]+", "", row.cell.weights)
    return _with_protocol(f"{policy} [{weights}]" if weights else policy, row)


def family(row: Row) -> str:
    """The method, whatever its budget and its weights, and the protocol: the rows of one curve share it."""
    return _with_protocol(row.policy["family"], row)


def _with_protocol(policy: str, row: Row) -> str:
    return policy if row.cell.protocol == "either" else f"{policy}, {row.cell.protocol}"


def quality(row: Row) -> list[float]:
    """Per sample, higher is better: the score, or minus the NLL where tokens are judged."""
    if row.metric == "perplexity":
        return [-value for value in row.each.nll]
    return list(row.each.score)


def weights(row: Row) -> list[int] | None:
    """Tokens, where samples count by them."""
    return row.each.tokens if row.metric == "perplexity" else None


def value(row: Row) -> float:
    """The number a table shows: percent, or perplexity."""
    shown = row.perplexity if row.metric == "perplexity" else row.score
    assert shown is not None
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
    """Live bytes, at their highest while answering, are within 2 %: the rule for matched memory."""
    return bool(abs(a.bytes.peak_live / b.bytes.peak_live - 1) <= TOLERANCE)


def gap(row: Row, window: Row, full: Row) -> tuple[float, float, float] | None:
    """Share of the perplexity between window and full that the row closes; None without such a gap."""
    tokens = np.asarray(full.each.tokens, float)
    nats = [np.asarray(each.each.nll, float) * tokens for each in (row, window, full)]

    def closed(at: np.ndarray) -> np.ndarray:
        ppl, window_ppl, full_ppl = (np.exp(x[at].sum(axis=-1) / tokens[at].sum(axis=-1)) for x in nats)
        return np.asarray((window_ppl - ppl) / np.where(window_ppl > full_ppl, window_ppl - full_ppl, np.nan))

    mean = float(closed(np.arange(len(tokens))))
    return None if math.isnan(mean) else (mean, *stats.spread(closed, len(tokens)))


@dataclasses.dataclass(frozen=True)
class Results:
    """Rows of one or more folders, in order."""

    rows: tuple[Row, ...]

    def where(self, test: Callable[[Row], bool]) -> list[Row]:
        """The rows that pass."""
        return [row for row in self.rows if test(row)]

    def full(self, row: Row) -> Row | None:
        """The full cache on the same samples."""
        return next((r for r in self.rows if r.cell.policy == FULL and r.cell.drawn == row.cell.drawn), None)

    def columns(self) -> list[tuple[str, str, int]]:
        """(group, task, length), in the order of groups."""
        columns = dict.fromkeys((r.group, r.cell.task, r.cell.length) for r in self.rows)
        order = {group: at for at, group in enumerate(ORDER)}  # suites come last
        return sorted(columns, key=lambda column: (order.get(column[0], len(order)), column[0], column[2]))

    def names(self) -> list[str]:
        """Policies with their protocols in order of appearance; the full cache first."""
        return sorted(dict.fromkeys(name(row) for row in self.rows), key=lambda n: n != FULL)


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


UNITS = {"perplexity": "ppl", "ndcg": "NDCG", "recall": "recall"}


def scores(results: Results, group: str) -> str:
    """One group's tasks: policies down, tasks and lengths across; * marks cells that say nothing."""
    columns = [column for column in results.columns() if column[0] == group]
    lines = []
    for policy in results.names():
        line = [f"`{policy}`"]
        for _, task, length in columns:
            rows = [r for r in results.rows if name(r) == policy and r.cell.drawn[:2] == (task, length)]
            if not rows:
                line.append("–")
                continue
            mean, low, high = pooled(rows)
            mark = "" if all(r.informative for r in rows) else "\\*"
            line.append(f"{mean:.1f}{mark} ({low:.1f}–{high:.1f})")
        if set(line[1:]) != {"–"}:
            lines.append(line)
    metrics = {row.cell.task: row.metric for row in reversed(results.rows)}
    heads = [f"{task} {length}, {UNITS.get(metrics[task], '%')}" for _, task, length in columns]
    return markdown(["policy", *heads], lines)


COSTS: dict[str, tuple[Callable[[Row], float | None], float]] = {
    "kept %": (lambda r: r.kept_fraction, 100),
    "peak %": (lambda r: r.peak_fraction, 100),
    "mean %": (lambda r: r.mean_fraction, 100),
    "live KiB": (lambda r: r.bytes.live, 1 / 1024),
    "allocated KiB": (lambda r: r.bytes.allocated, 1 / 1024),
    "peak allocated KiB": (lambda r: r.bytes.peak_allocated, 1 / 1024),
    "full KiB": (lambda r: r.bytes.full, 1 / 1024),
    "reads a step": (lambda r: r.reads_per_step, 1),
    "φ in it": (lambda r: r.reads.summary, 1),
    "to choose them": (lambda r: r.reads.selector, 1),
    "spans kept %": (lambda r: r.span_retention, 100),
    "answer": (lambda r: float(np.mean(r.each.written)) if r.each.written else None, 1),
}


def costs(results: Results) -> str:
    """What each policy held and read, by length; means over tasks."""

    def mean(rows: list[Row], of: Callable[[Row], float | None], scale: float) -> str:
        values = [x for x in map(of, rows) if x is not None]
        return f"{scale * sum(values) / len(values):.1f}" if values else "–"

    lines = []
    for policy in results.names():
        for length in sorted({row.cell.length for row in results.rows}):
            rows = [r for r in results.rows if name(r) == policy and r.cell.length == length]
            if rows:
                means = [mean(rows, of, scale) for of, scale in COSTS.values()]
                switches = rows[0].switches
                lines.append(
                    [f"`{policy}`", length, *means, switches.compress_at, switches.prefill_attention]
                )
    return markdown(["policy", "length", *COSTS, "compressed at", "prefill"], lines)


def losses(results: Results) -> str:
    """Difference from the full cache, paired, in points or nats a token; only informative cells."""
    lines = []
    for row in results.rows:
        full = results.full(row)
        if full is None or row is full or not row.informative:
            continue
        mean, low, high = loss(row, full)
        scale, unit = (1, "nats") if row.metric == "perplexity" else (100, "points")
        held = share(results, row) if row.cell.protocol == LONG else row.bytes.live / row.bytes.full
        cell = row.cell
        lines.append(
            [f"`{name(row)}`", cell.task, cell.length, cell.seed, f"{scale * mean:+.2f}",
             f"{scale * low:+.2f} … {scale * high:+.2f}", unit, f"{100 * held:.1f}"]
        )  # fmt: skip
    if not lines:
        return "No cell is informative and has another policy beside the full cache."
    heads = ["policy", "task", "length", "seed", "difference", "95 % (paired)", "in", "live % of full"]
    return markdown(heads, lines)


def long_answers(results: Results) -> str:
    """Words that the model wrote itself in long answers, beside teacher-forced ones; "" without any."""
    lines = []
    for row in results.where(lambda row: row.cell.protocol == LONG):
        full, cell = results.full(row), row.cell
        mean, low, high = (100 * x for x in stats.interval(row.each.score))
        forced = 100 * np.mean([np.mean(found) for found in row.each.found or []])
        lost = "–"
        if full is not None and full is not row:
            lost = "{:+.1f} ({:+.1f} … {:+.1f})".format(*(100 * x for x in loss(row, full)))
        mark = "" if row.informative else "\\*"
        lines.append(
            [f"`{cell.policy}`", cell.task, cell.length, cell.samples,
             f"{np.mean(row.each.written or []):.0f}", f"{100 * row.mean_fraction:.1f}",
             f"{100 * share(results, row):.1f}", f"{mean:.1f}{mark} ({low:.1f}–{high:.1f})", f"{forced:.1f}",
             lost]
        )  # fmt: skip
    heads = ["policy", "task", "length", "n", "answer, tokens", "kept %, mean", "peak bytes % of full"]
    heads += ["own words right, %", "teacher-forced, %", "from full, points"]
    return markdown(heads, lines) if lines else ""


def distances(results: Results) -> str:
    """How far each policy's distributions are from the full cache's; "" where no task compares them."""
    lines = []
    for row in results.where(lambda row: row.each.kl is not None and row.cell.policy != FULL):
        mean, low, high = stats.interval(row.each.kl or [])
        cell, held = row.cell, row.bytes.live / row.bytes.full
        lines.append(
            [f"`{name(row)}`", cell.task, cell.length, cell.samples, f"{100 * held:.1f}",
             f"{mean:.4f} ({low:.4f}–{high:.4f})", f"{100 * np.mean(row.each.top or []):.1f}",
             f"{row.perplexity:.2f}", f"{row.full.perplexity:.2f}"]
        )  # fmt: skip
    heads = ["policy", "task", "length", "n", "live % of full", "KL, nats a token", "same top token, %"]
    heads += ["ppl", "full's"]
    return markdown(heads, lines) if lines else ""


def matched(results: Results) -> str:
    """A learned policy less another one that holds the same bytes, paired; only informative cells."""
    lines = []
    for at, row in enumerate(results.rows):
        # Of two learned policies the first one in the results.
        others = [b for i, b in enumerate(results.rows) if not b.cell.weights or i > at]
        for other in others if row.cell.weights and row.informative else []:
            if _comparable(row, other):
                lines.append(_pair(results, row, other))
    heads = ["policy", "against", "task", "length", "n", "live % of full", "score", "difference",
             "95 % (paired)", "in"]  # fmt: skip
    return markdown(heads, lines) if lines else ""


def _comparable(row: Row, other: Row) -> bool:
    """Two methods on the same samples, at matched memory."""
    protocols = {row.cell.protocol, other.cell.protocol} - {"either"}
    alike = row.cell.drawn == other.cell.drawn and len(protocols) < 2
    return family(row) != family(other) and alike and same_bytes(row, other)


def _pair(results: Results, row: Row, other: Row) -> list[str]:
    difference = stats.difference(quality(row), quality(other), weights(row))
    text = row.metric == "perplexity"
    mean, low, high = (f"{(1 if text else 100) * x:+.{3 if text else 1}f}" for x in difference)
    cell, both = row.cell, (row, other)
    return [
        f"`{name(row)}`", f"`{name(other)}`", cell.task, str(cell.length), str(cell.samples),
        " / ".join(f"{100 * share(results, each):.1f}" for each in both),
        " / ".join(f"{value(each):.1f}" for each in both),
        mean, f"{low} … {high}", "nats a token" if text else "points",
    ]  # fmt: skip
