"""The Pareto front: quality over live bytes at 16 bits, as points, picture, tables and sentences."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Storage
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.protocol import LONG
from kvjax.eval.measure.row import Row
from kvjax.eval.report import stats, table
from kvjax.eval.report.plotting import panels, pyplot, saved, style
from kvjax.eval.report.table import Results
from kvjax.weights import DEFAULT

PROTOCOLS = {"agnostic": "question unseen", "aware": "question seen", LONG: "long answers"}
OTHERS = "all others (results.jsonl has every cell)"
NEAR, LEAST, MOST_NAMED = 5, 50, 12
"""Pictures name families within so many points of the front and above so many percent, at most so many."""
SLACK = 1.02
"""Bytes up to 2 % over a budget count as equal to it."""
ROOM = 1.2
"""Times a budget, for which the page names a policy: newest tokens and pages not full come on top."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A policy at one length under one protocol, over the informative tasks.

    Attributes:
      policy: the one-string form.
      name, family: the policy, and the policy with its budget left open, as tables show them: with weights
        that are not the default.
      weights: as results name them; "" where nothing is learned.
      kept: share of the tokens that are held.
      share: live bytes when the answer begins (of long answers their mean over it), at 16 bits an exact
        element, over those of the full cache.
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
    return float((size + storage.page_bytes(page, head_dim) / (2 * page)) / (2 * head_dim))


def share(row: Row, head_dim: int) -> float:
    """Live bytes at 16 bits over those of a cache that keeps everything; scales and φ counted."""
    policy, length = parse_policy(row.cell.policy), row.cell.length
    kept = row.mean_fraction if row.cell.protocol == LONG else row.kept_fraction
    slots, cost = kept * length, slot_cost(policy.storage, head_dim)
    exact = min(slots, policy.storage.recent if cost < 1 else slots)
    return float((exact + (slots - exact) * cost + row.reads.summary_paper) / length)


def _informative(results: Results) -> list[Row]:
    return [row for row in results.rows if row.informative and row.score is not None]


def _protocols(rows: Sequence[Row]) -> list[str]:
    there = {row.cell.protocol for row in rows}
    return sorted(there - {"either"} if there & {*PROTOCOLS} - {LONG} else there)


def points(results: Results, head_dim: int) -> dict[tuple[int, str], list[Point]]:
    """Points by (length, protocol); policies that decide on arrival count for every protocol.

    Of a policy's cells of one task, the one with most samples counts. A policy that was not measured on every
    task is left out: its mean would be over other tasks.
    """
    rows = _informative(results)
    by_key: dict[tuple[int, str], list[Point]] = {}
    for length in sorted({row.cell.length for row in rows}):
        for protocol in _protocols(results.rows):
            alike = (protocol,) if protocol == LONG else (protocol, "either")
            cells = [r for r in rows if r.cell.length == length and r.cell.protocol in alike]
            count = len({r.cell.task for r in cells})
            by_name: dict[str, dict[str, Row]] = {}
            for row in cells:
                best = by_name.setdefault(table.name(row), {})
                task = row.cell.task
                if task not in best or row.cell.samples > best[task].cell.samples:
                    best[task] = row
            if cells:
                by_key[length, protocol] = [
                    _point(list(best.values()), head_dim) for best in by_name.values() if len(best) == count
                ]
    return by_key


def _default(label: str) -> bool:
    """Whether these are the weights that a part takes when none are named."""
    return label.split("=")[-1].split("@")[0] == DEFAULT


def _name(policy: str, row: Row) -> str:
    others = [label for label in row.cell.weights.split(",") if label and not _default(label)]
    return f"{policy} [{', '.join(label.split('@')[0] for label in others)}]" if others else policy


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


def best_below(points: Sequence[Point], most: float) -> float:
    """The best score within so many bytes (a share)."""
    return max((p.score for p in points if p.share <= most * SLACK), default=0.0)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats at no more bytes, by bytes."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.share, -p.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best


def near(points: Sequence[Point], behind: float, least: float) -> list[Point]:
    """Those at most ``behind`` points behind the best of no more bytes, and of at least ``least`` percent."""
    return [p for p in points if p.score >= max(least, best_below(points, p.share) - behind)]


def _worth_naming(groups: Sequence[Sequence[Point]]) -> list[str]:
    """Families that are near the front; of too many those that are on it in most groups."""
    on_it = collections.Counter(p.family for group in groups for p in front(group))
    there = {p.family for group in groups for p in near(group, NEAR, LEAST)}
    return sorted(sorted(there, key=lambda family: (-on_it[family], family))[:MOST_NAMED])


def draw(results: Results, head_dim: int, file: Path) -> Path:
    """One panel a length and protocol: every point, the front as a line; families near it by name."""
    plt = pyplot()
    by_key = points(results, head_dim)
    named = _worth_naming(list(by_key.values()))
    styles = {family: style(number) for number, family in enumerate(named)}
    figure, axes = panels(plt, len(by_key), 2, (5.2, 3.2), top=0.3 + 0.08 * len(named))
    handles: dict[str, Any] = {}
    for axis, ((length, protocol), group) in zip(axes, by_key.items()):
        line = front(group)
        axis.step(
            [100 * p.share for p in line], [p.score for p in line], where="post", c="0.4", lw=2.5, alpha=0.5
        )
        for family in dict.fromkeys(p.family for p in group):
            own = sorted((p for p in group if p.family == family), key=lambda p: p.share)
            error = [[max(0, p.score - p.low) for p in own], [max(0, p.high - p.score) for p in own]]
            x, y = [100 * p.share for p in own], [p.score for p in own]
            if family in styles:
                handles[family] = axis.errorbar(x, y, error, ms=5, lw=1, capsize=1.5, **styles[family])
            else:
                handles[OTHERS] = axis.plot(x, y, ".-", ms=4, lw=0.6, c="0.8", zorder=0)[0]
        axis.set_title(f"{length} tokens, {_question(protocol)}", fontsize=9)
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


def _question(protocol: str) -> str:
    return PROTOCOLS.get(protocol, "either way")


MOST = 25
"""Rows of the page's table; every point is in the folder's results.jsonl."""


def table_of(results: Results, head_dim: int, protocols: Sequence[str] = ("agnostic", "either")) -> str:
    """The front under these protocols, by length and bytes.

    Of more than ``MOST`` points, those that gain most over the one before stay.
    """
    by_key = {key: group for key, group in points(results, head_dim).items() if key[1] in protocols}
    lines: list[tuple[float, list[Any]]] = []
    for length, protocol in sorted(by_key):
        group, before = by_key[length, protocol], 0.0
        for p in front([p for p in group if beats_window(p, group)]):
            score = f"{p.score:.1f} ({p.low:.1f} … {p.high:.1f})"
            line = [length, f"`{p.name}`", f"{100 * p.share:.1f} %", p.tasks, score]
            lines.append((p.score - before, line))
            before = p.score
    least = sorted((gain for gain, _ in lines), reverse=True)[:MOST][-1:]
    shown = [line for gain, line in lines if least and gain >= least[0]][:MOST]
    return table.markdown(["length", "policy", "bytes", "tasks", "score, % (95 %)"], shown)


def beats_window(point: Point, group: Sequence[Point]) -> bool:
    """Whether a point is at least as good as a plain window with sinks at its bytes.

    Between measured windows the score is taken as linear in the bytes, from 0 at none.
    """
    windows = sorted((p.share, p.score) for p in group if parse_policy(p.policy).admission.rejects_all)
    if not windows:
        return True
    shares, scores = zip((0.0, 0.0), *windows)
    return point.score >= float(np.interp(point.share, shares, scores)) - 1e-9


def for_auto(point: Point, group: Sequence[Point]) -> bool:
    """Whether ``auto`` may take a point: no worse than a window, and without a second pass over the prompt.

    A second pass takes the prompt's time and positions once more, which nobody asked for by naming a size.
    """
    return not parse_policy(point.policy).eviction.replays and beats_window(point, group)


def page(results: Results, head_dim: int, shares: Sequence[float], command: str) -> str:
    """The page for people who choose a policy."""
    parts = [
        "# The front",
        f"Generated by `{command}`; do not edit.",
        needs(results, head_dim, shares),
        "![Score over bytes](front.png)",
        "Policies that no other beats at no more bytes and that are no worse than a plain window there; "
        "question unseen, mean over tasks. Every policy, task and sample is in `results.jsonl`; "
        "`python -m kvjax.eval report` makes tables of this folder.",
        table_of(results, head_dim),
    ]
    if any(row.cell.protocol == LONG for row in results.rows):
        parts += ["While long answers are written:", table_of(results, head_dim, (LONG,))]
    return "\n\n".join(parts) + "\n"


def needs(results: Results, head_dim: int, shares: Sequence[float]) -> str:
    """Which policy to take: a line a budget and protocol, at the longest length measured."""
    lines = []
    by_key = points(results, head_dim)
    longest = {protocol: max(n for n, p in by_key if p == protocol) for _, protocol in by_key}
    for protocol in sorted(longest, key=[*PROTOCOLS, "either"].index):
        length = longest[protocol]
        group = by_key[length, protocol]
        full = next((p for p in group if p.policy == table.FULL), None)
        for most in (ROOM * share for share in shares):
            fits = [p for p in group if p.share <= most and p.policy != table.FULL]
            if fits:
                best = max(fits, key=lambda p: p.score)
                held, score = f"{100 * most:.0f} % of the bytes", f"{best.score:.1f}"
                line = [_question(protocol), length, held, f"`{best.name}`", score]
                lines.append([*line, "" if full is None else f"{full.score:.1f}"])
    columns = ["protocol", "length", "at most", "take", "score, %", "full cache"]
    return table.markdown(columns, lines) if lines else "No cell was informative: nothing can be said."


def as_json(results: Results, head_dim: int, about: dict[str, Any], command: str) -> str:
    """The front as ``auto`` reads it, by length and protocol, with its model and command.

    Points whose weights are not the default are left out, and those that are not ``for_auto``. The front of
    policies that learn nothing is there too: another model can have those.
    """
    entries = []
    for (length, protocol), group in points(results, head_dim).items():
        usable = [p for p in group if all(_default(label) for label in p.weights.split(",") if label)]
        usable = [p for p in usable if for_auto(p, group)]
        both = front(usable) + front([p for p in usable if not p.weights])
        entries += [
            {"length": length, "protocol": protocol, **dataclasses.asdict(point)}
            for point in dict.fromkeys(both)
            if point.policy != table.FULL
        ]
    facts = {"command": command, "model": about["model"], "fingerprint": about["fingerprint"]}
    return json.dumps(facts | {"front": entries}, indent=1, ensure_ascii=False) + "\n"
