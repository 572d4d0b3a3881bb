"""Pictures of results, as PNG: quality against bytes and reads, depth by length, kept slots by head."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.algebra import PLACES
from kvjax.catalogue import opened
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.report import table
from kvjax.eval.report.plotting import bar, map_of, panels, pyplot, saved, style, wrapped
from kvjax.eval.report.table import Results

UNITS = {"perplexity": "perplexity (lower is better)", "ndcg": "NDCG, %", "recall": "recall, %"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Every figure the results allow; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [against_bytes(results, folder / "bytes.png"), heads(results, folder / "heads.png")]
    if any(row.selects for row in results.rows):
        files.append(against_reads(results, folder / "reads.png"))
    if any("depth_from_end" in row.each.tags for row in results.rows):
        files.append(depths(results, folder / "depth.png"))
    if any("gap" in row.each.tags for row in results.rows):
        files.append(gaps(results, folder / "gap.png"))
    return files


def against_bytes(results: Results, file: Path) -> Path:
    """Quality over live bytes at their highest, the measure of matched memory, in % of the full cache."""
    label = "live bytes at their highest, % of the full cache's"
    return _against(results, file, of=lambda row: 100 * table.share(results, row), label=label)


def against_reads(results: Results, file: Path) -> Path:
    """Quality over what a decode step reads."""
    label = "tokens read per KV head and decode step"
    return _against(results, file, of=lambda row: row.reads_per_step, label=label, log=True)


def _against(
    results: Results, file: Path, *, of: Callable[[Row], float], label: str, log: bool = False
) -> Path:
    """One panel a task and length: quality over ``of`` a row, with intervals; the full cache as a line.

    Policies that differ only in the size of their budget, or in their gates, are joined to one curve.
    """
    plt = pyplot()
    columns = results.columns()
    family_of = {table.name(row): table.family(row) for row in results.rows}
    families: dict[str, list[str]] = {}
    for name in results.names():
        families.setdefault(family_of[name], []).append(name)
    wide = 3.3 if len(columns) > 1 else 6.6
    broad, longest = wide * min(4, len(columns)), max(map(len, families))
    # Names in a line of the legend.
    beside = max(1, min(int(broad // 3.3), int(broad // (0.5 + 0.07 * longest))))
    figure, axes = panels(plt, len(columns), 4, (wide, 2.7), top=0.3 + 0.22 * -(-len(families) // beside))
    handles = {}
    for axis, (_, task, length) in zip(axes, columns):
        rows = [r for r in results.rows if r.cell.drawn[:2] == (task, length)]
        for number, (family, names) in enumerate(families.items()):
            points = []
            for name in names:
                if cells := [r for r in rows if table.name(r) == name]:
                    points.append((np.mean([of(r) for r in cells]), *table.pooled(cells)))
            if not points:
                continue
            x, mean, low, high = np.asarray(sorted(points)).T
            if family == table.FULL:
                axis.axhline(mean[0], color="0.6", lw=1, ls="--", zorder=0)
            error = np.maximum(0, [mean - low, high - mean])
            shown = family if len(names) > 1 else names[0]
            handles[shown] = axis.errorbar(x, mean, error, ms=6, capsize=2, lw=1, **style(number))
        informative = all(r.informative for r in rows)
        axis.set_title(f"{task} {length}" + ("" if informative else "  (not informative)"), fontsize=9)
        axis.set_ylabel(UNITS.get(rows[0].metric, "%"), fontsize=8)
        axis.tick_params(labelsize=8)
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
        else:
            axis.set_xlim(left=0)
        if rows[0].metric != "perplexity":
            axis.set_ylim(-4, 104)
    figure.supxlabel(label, fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncol=beside, fontsize=8, frameon=False
    )
    return saved(plt, figure, file)


def depths(results: Results, file: Path) -> Path:
    """One panel a method: score by length and distance of the needle from the end."""
    plt = pyplot()
    rows = results.where(lambda row: "depth_from_end" in row.each.tags)
    by_method = methods(rows)
    lengths = sorted({row.cell.length for row in rows})
    edges = np.arange(0, 101, 20)
    figure, axes = panels(plt, len(by_method), 4, (2.9, 2.7))
    for axis, (method, own) in zip(axes, by_method.items()):
        grid = np.full((len(edges) - 1, len(lengths)), np.nan)
        for column, length in enumerate(lengths):
            cells = [r for r in own if r.cell.length == length]
            depth = np.asarray([d for r in cells for d in r.each.tags["depth_from_end"]], float)
            score = np.asarray([s for r in cells for s in r.each.score], float)
            bins = np.clip(np.digitize(depth, edges) - 1, 0, len(edges) - 2)
            for i in set(bins.tolist()):
                grid[i, column] = 100 * score[bins == i].mean()
        ticks = [f"{a}–{a + 20}" for a in edges[:-1]]
        image = map_of(axis, grid, (ticks, lengths), wrapped(method, 34))
    bar(figure, image, axes, "score, %")
    figure.supylabel("needle, % of the text from the end", fontsize=9)
    figure.supxlabel("length, tokens", fontsize=9)
    return saved(plt, figure, file)


def gaps(results: Results, file: Path) -> Path:
    """Recall of pairs over the tokens since they were given: the distance at which a policy forgets."""
    plt = pyplot()
    rows = results.where(lambda row: "gap" in row.each.tags)
    figure, (axis,) = panels(plt, 1, 1, (8, 4))
    for number, policy in enumerate(results.names()):
        cells = [r for r in rows if table.name(r) == policy]
        if not cells:
            continue
        gap = np.asarray([g for r in cells for each in r.each.tags["gap"] for g in each], float)
        recalled = np.asarray([f for r in cells for each in r.each.found or () for f in each], float)
        edges = np.unique(np.quantile(gap, np.linspace(0, 1, 7)))
        bins = np.clip(np.digitize(gap, edges) - 1, 0, max(0, len(edges) - 2))
        used = sorted(set(bins.tolist()))
        share = [100 * recalled[bins == i].mean() for i in used]
        axis.plot([gap[bins == i].mean() for i in used], share, ms=5, lw=1, label=policy, **style(number))
    axis.set_xlabel("tokens between pair and question", fontsize=9)
    axis.set_ylabel("recalled, %", fontsize=9)
    axis.set_ylim(-4, 104)
    figure.legend(loc="outside upper center", ncol=2, fontsize=8, frameon=False)
    return saved(plt, figure, file)


def heads(results: Results, file: Path) -> Path:
    """One panel a policy: kept fraction of every layer and KV head, mean over cells."""
    plt = pyplot()
    names = results.names()
    layers, kv = np.shape(results.rows[0].heads)
    figure, axes = panels(plt, len(names), 5, (max(2.4, 0.3 * min(kv, 12)), 2.2 + 0.12 * min(layers, 32)))
    for axis, policy in zip(axes, names):
        kept = 100 * np.mean([r.heads for r in results.rows if table.name(r) == policy], axis=0)
        image = map_of(axis, kept, (range(layers), range(kv)), wrapped(policy, 30))
    bar(figure, image, axes, "live slots of tokens seen, %")
    figure.supylabel("layer", fontsize=9)
    figure.supxlabel("KV head", fontsize=9)
    return saved(plt, figure, file)


def methods(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by method, whatever the budget, each method under one name, in order of appearance.

    Budgets often follow the length, and then every length has policies of its own. A policy that occurs at
    one length only is joined with those of other lengths that have the same parts. If there are several at
    one length, the first is joined with the first, the second with the second.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(table.name(row), []).append(row)
    groups: dict[tuple[Hashable, int], list[str]] = {}
    seen: collections.Counter[Hashable] = collections.Counter()
    for name, own in by_name.items():
        lengths = {row.cell.length for row in own}
        if len(lengths) > 1:
            groups[name, 0] = [name]
            continue
        key = _method(own[0]), lengths.pop()
        groups.setdefault((key[0], seen[key]), []).append(name)
        seen[key] += 1
    return {
        names[0] if len(names) == 1 else _label([by_name[name][0] for name in names]): [
            row for name in names for row in by_name[name]
        ]
        for names in groups.values()
    }


def _method(row: Row) -> Hashable:
    """What policies of one method share: parts, protections, learned weights, protocol; numbers are free."""
    policy = row.policy
    return row.parts, bool(policy["sinks"]), bool(policy["recent"]), row.cell.weights, row.cell.protocol


def _label(rows: list[Row]) -> str:
    """The policies' one-string form; fields that differ are shown as "…"."""
    policies = [parse_policy(row.cell.policy) for row in rows]
    fields = {place: _differing([getattr(policy, place) for policy in policies]) for place in PLACES}
    own = [name for name in _differing(policies) if name not in PLACES]
    return table.named(opened(policies[0], fields | {"": own}), rows[0])


def _differing(values: Sequence[Any]) -> list[str]:
    """Fields in which dataclasses of one class differ."""
    names = [field.name for field in dataclasses.fields(values[0])]
    return [name for name in names if len({getattr(value, name) for value in values}) > 1]
