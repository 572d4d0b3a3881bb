"""Pictures of results, as PNG: quality against bytes, depth by length, kept slots by layer and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval import table
from kvjax.eval.errors import EvalError
from kvjax.eval.table import Results


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise EvalError(
            "report draws with matplotlib, which is not installed. Run: pip install 'kvjax[plot]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(results: Results, folder: Path) -> list[Path]:
    """Every figure the results allow; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [against_bytes(results, folder / "bytes.png"), heads(results, folder / "heads.png")]
    if any("depth_from_end" in row["each"] for row in results.rows):
        made.append(depths(results, folder / "depth.png"))
    if any("gap" in row["each"] for row in results.rows):
        made.append(gaps(results, folder / "gap.png"))
    return made


def against_bytes(results: Results, file: Path) -> Path:
    """One panel a task and length: quality over live bytes, with intervals; the full cache as a line."""
    plt = _pyplot()
    columns = results.columns()
    across = min(4, len(columns))
    down = -(-len(columns) // across)
    figure, axes = plt.subplots(down, across, figsize=(max(9.0, 3.6 * across), 2.9 * down + 1), squeeze=False)
    names = results.names()
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    handles = {}
    for axis, (_, task, length) in zip(axes.flat, columns):
        rows = [r for r in results.rows if table.samples(r)[:2] == (task, length)]
        for policy in names:
            mine = [r for r in rows if table.name(r) == policy]
            if not mine:
                continue
            mean, low, high = table.pooled(mine)
            held = np.mean([r["bytes"]["live"] for r in mine]) / 1024
            if policy == table.FULL:
                axis.axhline(mean, color="0.6", lw=1, ls="--")
            error = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
            handles[policy] = axis.errorbar(
                held, mean, error, fmt="o", ms=5, color=colours[policy], capsize=2
            )
        told = all(r["informative"] for r in rows)
        axis.set_title(f"{task} {length}" + ("" if told else " (not informative)"), fontsize=8)
        axis.set_xlabel("live KiB a row", fontsize=7)
        axis.set_ylabel("perplexity" if rows[0]["metric"] == "perplexity" else "%", fontsize=7)
        axis.tick_params(labelsize=7)
        axis.set_xlim(left=0)
    for axis in axes.flat[len(columns) :]:
        axis.axis("off")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=7)
    lines = 0.3 + 0.18 * -(-len(handles) // 3)  # inches of the legend
    figure.tight_layout(rect=(0, lines / figure.get_figheight(), 1, 1))
    return _saved(plt, figure, file)


def depths(results: Results, file: Path) -> Path:
    """One panel a policy: score by length and distance of the needle from the end."""
    plt = _pyplot()
    rows = results.where(lambda row: "depth_from_end" in row["each"])
    names = [name for name in results.names() if any(table.name(r) == name for r in rows)]
    lengths = sorted({row["cell"]["length"] for row in rows})
    edges = np.arange(0, 101, 20)
    across = min(4, len(names))
    down = -(-len(names) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.2 * across, 2.6 * down), squeeze=False)
    for axis, policy in zip(axes.flat, names):
        grid = np.full((len(edges) - 1, len(lengths)), np.nan)
        for column, length in enumerate(lengths):
            mine = [r for r in rows if table.name(r) == policy and r["cell"]["length"] == length]
            depth = np.asarray([d for r in mine for d in r["each"]["depth_from_end"]], float)
            score = np.asarray([s for r in mine for s in r["each"]["score"]], float)
            bins = np.clip(np.digitize(depth, edges) - 1, 0, len(edges) - 2)
            for i in set(bins.tolist()):
                grid[i, column] = 100 * score[bins == i].mean()
        axis.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        for (i, j), value in np.ndenumerate(grid):
            axis.text(j, i, "–" if np.isnan(value) else f"{value:.0f}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(lengths)), lengths, fontsize=7)
        axis.set_yticks(range(len(edges) - 1), [f"{a}–{a + 20} %" for a in edges[:-1]], fontsize=7)
        axis.set_title(policy, fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supylabel("needle from the end", fontsize=8)
    figure.supxlabel("length", fontsize=8)
    figure.tight_layout()
    return _saved(plt, figure, file)


def gaps(results: Results, file: Path) -> Path:
    """Recall of pairs by how many tokens ago they were told: the distance until a policy forgets."""
    plt = _pyplot()
    rows = results.where(lambda row: "gap" in row["each"])
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for policy in [name for name in results.names() if any(table.name(r) == name for r in rows)]:
        mine = [r for r in rows if table.name(r) == policy]
        gap = np.asarray([g for r in mine for each in r["each"]["gap"] for g in each], float)
        found = np.asarray([f for r in mine for each in r["each"]["found"] for f in each], float)
        edges = np.unique(np.quantile(gap, np.linspace(0, 1, 7)))
        bins = np.clip(np.digitize(gap, edges) - 1, 0, max(0, len(edges) - 2))
        there = sorted(set(bins.tolist()))
        axis.plot([gap[bins == i].mean() for i in there], [100 * found[bins == i].mean() for i in there],
                  marker="o", ms=3, label=policy)  # fmt: skip
    axis.set_xlabel("tokens between pair and question")
    axis.set_ylabel("recalled, %")
    axis.legend(fontsize=6)
    figure.tight_layout()
    return _saved(plt, figure, file)


def heads(results: Results, file: Path) -> Path:
    """One panel a policy: kept fraction of every layer and KV head, mean over cells."""
    plt = _pyplot()
    names = results.names()
    across = min(6, len(names))
    down = -(-len(names) // across)
    figure, axes = plt.subplots(down, across, figsize=(2.3 * across, 2.6 * down), squeeze=False)
    for axis, policy in zip(axes.flat, names):
        kept = 100 * np.mean([r["heads"] for r in results.rows if table.name(r) == policy], axis=0)
        axis.imshow(kept, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(kept):
            axis.text(
                j, i, f"{value:.0f}", ha="center", va="center", fontsize=7, color="w" if value < 60 else "k"
            )
        axis.set_title(policy, fontsize=6)
        axis.set_xlabel("KV head", fontsize=7)
        axis.set_ylabel("layer", fontsize=7)
        axis.set_xticks(range(kept.shape[1]))
        axis.set_yticks(range(kept.shape[0]))
        axis.tick_params(labelsize=6)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.suptitle("live slots of tokens seen, %", fontsize=8)
    figure.tight_layout()
    return _saved(plt, figure, file)


def _saved(plt: Any, figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
