"""The Pareto front: quality over live bytes at 16 bits, as points, picture, table and a sentence a need."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Storage
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.report import stats, table
from kvjax.eval.report.plotting import panels, pyplot, saved, style
from kvjax.eval.report.table import Results
from kvjax.weights import DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A policy at one length under one protocol, over the informative tasks.

    Attributes:
      policy: the one-string form.
      name: the same with weights that are not the default, as tables show it.
      family: it with its budget left open, and such weights.
      weights: what it was run with, as results name them; "" where nothing is learned.
      kept: share of the tokens that are held.
      share: live bytes when the answer begins, at 16 bits an exact element, over those of the full cache.
      score: mean over tasks, percent.
      low, high: its 95 % interval, over samples.
      tasks: how many.
    """

    policy: str
    name: str
    family: str
    weights: str
    kept: float
    share: float
    score: float
    low: float
    high: float
    tasks: int


def slot_cost(storage: Storage, head_dim: int, page: int = 64) -> float:
    """Bytes of a stored key and value over those at 16 bits, a page's scales shared by its slots."""
    if storage.exact:
        return 1.0
    size = storage.width(head_dim) * storage.dtype(jnp.dtype(jnp.float32)).itemsize
    return float((size + (4 * head_dim / page if storage.scaled else 0)) / (2 * head_dim))


def share(row: Row, head_dim: int) -> float:
    """Live bytes at 16 bits over those of a cache that keeps everything; scales and φ counted."""
    policy, length = parse_policy(row.cell.policy), row.cell.length
    slots, cost = row.kept_fraction * length, slot_cost(policy.storage, head_dim)
    exact = min(slots, policy.storage.recent if cost < 1 else slots)
    return float((exact + (slots - exact) * cost + row.reads.summary_paper) / length)


def points(results: Results, head_dim: int) -> dict[tuple[int, str], list[Point]]:
    """Points by (length, protocol); policies that decide on arrival stand in every protocol.

    Of cells of one policy the one with most samples counts.
    """
    protocols = sorted({r.cell.protocol for r in results.rows} - {"either"}) or ["either"]
    rows = [r for r in results.rows if r.informative and r.score is not None]
    found: dict[tuple[int, str], list[Point]] = {}
    for length in sorted({r.cell.length for r in rows}):
        for protocol in protocols:
            here = [r for r in rows if r.cell.length == length and r.cell.protocol in (protocol, "either")]
            every = len({r.cell.task for r in here})
            made = []
            for name in dict.fromkeys(table.name(r) for r in here):
                mine = _most([r for r in here if table.name(r) == name])
                if len(mine) == every:  # on fewer tasks it would be another mean
                    made.append(_point(mine, head_dim))
            found[length, protocol] = made
    return found


def _most(rows: list[Row]) -> list[Row]:
    """One row a task: that of most samples."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.cell.task not in best or row.cell.samples > best[row.cell.task].cell.samples:
            best[row.cell.task] = row
    return list(best.values())


def _name(policy: str, row: Row) -> str:
    given = [one for one in row.cell.weights.split(",") if one and not _by_itself(one)]
    return f"{policy} [{', '.join(one.split('@')[0] for one in given)}]" if given else policy


def _point(rows: list[Row], head_dim: int) -> Point:
    values = [q for row in rows for q in table.quality(row)]
    weights = [1 / len(row.each.score) for row in rows for _ in row.each.score]
    mean, low, high = (100 * x for x in stats.interval(values, weights))
    return Point(
        policy=rows[0].cell.policy,
        name=_name(rows[0].cell.policy, rows[0]),
        family=_name(rows[0].policy["family"], rows[0]),
        weights=rows[0].cell.weights,
        kept=float(np.mean([row.kept_fraction for row in rows])),
        share=float(np.mean([share(row, head_dim) for row in rows])),
        score=mean,
        low=low,
        high=high,
        tasks=len(rows),
    )


def best_below(there: Sequence[Point], most: float) -> float:
    """The best score that no more bytes buy (2 % more are no more)."""
    return max((p.score for p in there if p.share <= most * 1.02), default=0.0)


def front(there: Sequence[Point]) -> list[Point]:
    """The points that none beats at no more bytes, by bytes."""
    found: list[Point] = []
    for point in sorted(there, key=lambda p: (p.share, -p.score)):
        if not found or point.score > found[-1].score:
            found.append(point)
    return found


def near(there: Sequence[Point], points: float, least: float) -> list[Point]:
    """Those within so many points of the best that no more bytes buy, and of at least ``least`` percent."""
    return [p for p in there if p.score >= max(least, best_below(there, p.share) - points)]


OTHERS = "all others (front.md has every cell)"
NEAR, LEAST = 5, 50
"""Points behind the front, and percent, up from which a picture names a family; the others are grey."""


def draw(results: Results, head_dim: int, file: Path) -> Path:
    """One panel a length and protocol: every point, the front as a line; families near it by name."""
    plt = pyplot()
    found = points(results, head_dim)
    named = sorted({p.family for there in found.values() for p in near(there, NEAR, LEAST)})
    styles = {family: style(number) for number, family in enumerate(named)}
    figure, axes = panels(plt, len(found), 2, (5.2, 3.2), top=0.3 + 0.08 * len(named))
    handles: dict[str, Any] = {}
    for axis, ((length, protocol), there) in zip(axes, found.items()):
        line = front(there)
        axis.step(
            [100 * p.share for p in line], [p.score for p in line], where="post", c="0.4", lw=2.5, alpha=0.5
        )
        for family in dict.fromkeys(p.family for p in there):
            mine = sorted((p for p in there if p.family == family), key=lambda p: p.share)
            error = [[max(0, p.score - p.low) for p in mine], [max(0, p.high - p.score) for p in mine]]
            x, y = [100 * p.share for p in mine], [p.score for p in mine]
            if family in styles:
                handles[family] = axis.errorbar(x, y, error, ms=5, lw=1, capsize=1.5, **styles[family])
            else:
                handles[OTHERS] = axis.plot(x, y, ".-", ms=4, lw=0.6, c="0.8", zorder=0)[0]
        axis.set_title(f"{length} tokens, {_said(protocol)}", fontsize=9)
        axis.set_xlim(0, 105)
        axis.set_ylim(-4, 104)
        axis.tick_params(labelsize=8)
    figure.supxlabel(
        "live bytes at 16 bits, % of the full cache's (the line: no policy is better for less)", fontsize=9
    )
    figure.supylabel("mean score over tasks, %", fontsize=9)
    names = [*(name for name in styles if name in handles), *([OTHERS] if OTHERS in handles else [])]
    figure.legend(
        [handles[n] for n in names], names, loc="outside upper center", ncol=2, fontsize=8, frameon=False
    )
    return saved(plt, figure, file)


def _said(protocol: str) -> str:
    return {"agnostic": "question unseen", "aware": "question seen"}.get(protocol, "either way")


def best_table(results: Results, head_dim: int, shares: Sequence[float]) -> str:
    """The best policy at each budget, for each task, length and protocol, with its interval.

    Of the cells with most samples: the best of many with few is often a lucky one.
    """
    lines = []
    rows = [r for r in results.rows if r.informative and r.score is not None and r.cell.policy != table.FULL]
    protocols = sorted({r.cell.protocol for r in rows} - {"either"}) or ["either"]
    for length, task in sorted({(r.cell.length, r.cell.task) for r in rows}):
        for protocol in protocols:
            here = [
                r for r in rows if (r.cell.task, r.cell.length) == (task, length)
                and r.cell.protocol in (protocol, "either")
            ]  # fmt: skip
            here = [r for r in here if r.cell.samples == max(r.cell.samples for r in here)]
            for most in shares:
                fits = [r for r in here if share(r, head_dim) <= 1.02 * most]
                if fits:
                    best = max(fits, key=lambda r: (r.score or 0.0, -share(r, head_dim)))
                    mean, low, high = (100 * x for x in stats.interval(table.quality(best)))
                    name = _name(best.cell.policy, best)
                    lines.append(
                        [length, task, _said(protocol), f"{100 * most:.0f} %", f"`{name}`",
                         f"{100 * share(best, head_dim):.0f} %", f"{mean:.1f} ({low:.1f} … {high:.1f})",
                         best.cell.samples]
                    )  # fmt: skip
    heads = ["length", "task", "question", "budget", "best policy", "its bytes", "score, %", "n"]
    return table.markdown(heads, lines)


def every_point(results: Results, head_dim: int) -> str:
    """All points, by length and protocol, then bytes; those of the front in bold."""
    lines = []
    for (length, protocol), there in points(results, head_dim).items():
        best = front(there)
        for p in sorted(there, key=lambda p: (p.share, -p.score)):
            mark = "**" if p in best else ""
            score = f"{mark}{p.score:.1f}{mark} ({p.low:.1f} … {p.high:.1f})"
            lines.append([length, _said(protocol), f"`{p.name}`", f"{100 * p.share:.1f} %", score, p.tasks])
    return table.markdown(["length", "question", "policy", "bytes", "score, %", "tasks"], lines)


def page(results: Results, head_dim: int, shares: Sequence[float], command: str) -> str:
    """What a person choosing a policy reads."""
    parts = [
        "# The front",
        f"Generated by `{command}`; do not edit.",
        needs(results, head_dim, shares),
        "![Score over bytes](front.png)",
        "## The best at each budget",
        best_table(results, head_dim, shares),
        "## Every policy, over all tasks",
        every_point(results, head_dim),
    ]
    return "\n\n".join(parts) + "\n"


def needs(results: Results, head_dim: int, shares: Sequence[float]) -> str:
    """Which policy for which need: a sentence a protocol, over the longest length that was measured."""
    said = []
    found = points(results, head_dim)
    longest = max((length for length, _ in found), default=0)
    for (length, protocol), there in found.items():
        if length != longest:
            continue
        full = next((p for p in there if p.policy == table.FULL), None)
        for most in shares:
            fits = [p for p in there if p.share <= 1.02 * most and p.policy != table.FULL]
            if fits:
                best = max(fits, key=lambda p: p.score)
                loss = "" if full is None else f", {best.score - full.score:+.1f} points from the full cache"
                said.append(
                    f"For at most {100 * most:.0f} % of the bytes, with the {_said(protocol)}, take "
                    f"`{best.name}` ({best.score:.1f} %{loss})."
                )
    return " ".join(said) or "No cell was informative: nothing can be said."


def _by_itself(label: str) -> bool:
    """Are those the weights of a part that are taken where none are named?"""
    return label.split("=")[-1].split("@")[0] == DEFAULT


def as_json(results: Results, head_dim: int, whose: dict[str, Any], command: str) -> str:
    """The front as ``auto`` reads it, by length and protocol, and whose it is.

    Points of weights that a policy is not given by itself are left out. Where the front is of learned parts,
    that of the others stands beside it: it is what another model can have.
    """
    found = []
    for (length, protocol), every in points(results, head_dim).items():
        there = [p for p in every if all(_by_itself(one) for one in p.weights.split(",") if one)]
        both = front(there) + front([p for p in there if not p.weights])
        found += [
            {"length": length, "protocol": protocol, **dataclasses.asdict(point)}
            for point in dict.fromkeys(both)
            if point.policy != table.FULL
        ]
    about = {"command": command, "model": whose["model"], "fingerprint": whose["fingerprint"]}
    return json.dumps(about | {"front": found}, indent=1, ensure_ascii=False) + "\n"
