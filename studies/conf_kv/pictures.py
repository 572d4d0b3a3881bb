"""Pictures of the studies of CONF-KV, from their JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval.report.plotting import COLOURS, panels, pyplot, saved, style

Found = dict[str, Any]

SAID = {
    "recent": "newest {cut} tokens taken out (the paper's)",
    "older": "all but the newest {cut} taken out (what eviction takes)",
}


def read(folder: Path, study: str) -> list[Found]:
    """The files of a study, in the order of their names."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{study}_*.json"))]


def draw(folder: Path) -> list[Path]:
    """Every picture the folder's files allow."""
    files = []
    pictures = (("premise", premise), ("rate", rate), ("rate", sawtooth), ("sweep", sweep), ("alpha", alpha))
    for study, picture in pictures:
        if trees := read(folder, study):
            files.append(picture(trees, folder / f"{picture.__name__}.png"))
    return files


def _title(tree: Found) -> str:
    return f"{tree['task']} {tree['length']}, {tree['samples']} windows"


def premise(trees: list[Found], file: Path) -> Path:
    """Mean shift by confidence, for both cuts, and how often each confidence occurs."""
    plt = pyplot()
    figure, axes = panels(plt, 3 * len(trees), 3, (4.2, 3.0))
    for tree, (*shifts, histogram) in zip(trees, [axes[i : i + 3] for i in range(0, len(axes), 3)]):
        for number, (axis, (name, shift)) in enumerate(zip(shifts, tree["shifts"].items())):
            bins = shift["bins"]
            x, y, error = ([b[key] for b in bins] for key in ("confidence", "shift", "error"))
            axis.errorbar(x, y, error, capsize=2, lw=1, ms=4, **style(number))
            r, low, high = shift["r"]["confidence"]
            axis.set_title(
                f"{SAID[name].format(cut=tree['cut'])}\nr = {r:+.2f} ({low:+.2f} … {high:+.2f})", fontsize=8
            )
            axis.set_ylim(bottom=0)
            axis.set_ylabel("KL(full || cut), nats", fontsize=8)
        shifts[0].annotate(_title(tree), (0.02, 0.03), xycoords="axes fraction", fontsize=7, color="0.4")
        edges = tree["histogram"]["edges"]
        histogram.stairs(np.asarray(tree["histogram"]["counts"]) / tree["steps"], edges, fill=True)
        histogram.set_title(f"confidence of {tree['steps']:,} steps", fontsize=8)
        histogram.set_ylabel("share of steps", fontsize=8)
        for axis in (*shifts, histogram):
            axis.set_xlabel("confidence", fontsize=8)
            axis.tick_params(labelsize=7)
    return saved(plt, figure, file)


def rate(trees: list[Found], file: Path) -> Path:
    """What each ranking and schedule loses against CONF-KV's own, in nats a token."""
    plt = pyplot()
    figure, axes = panels(plt, len(trees), 2, (4.6, 2.8))
    for axis, tree in zip(axes, trees):
        own, *others = tree["entries"]
        for at, other in enumerate(others):
            mean, low, high = other["difference"]
            axis.errorbar(mean, at, xerr=[[mean - low], [high - mean]], capsize=3, ms=5, lw=1, **style(at))
        axis.axvline(0, color="0.6", lw=1, ls="--", zorder=0)
        names = [f"{o['name']} ({o['perplexity']:.1f})" for o in others]
        axis.set_yticks(range(len(others)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{_title(tree)}; CONF-KV: {own['perplexity']:.1f}", fontsize=8)
        axis.set_xlabel("nats a token more than CONF-KV (95 %)", fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
    return saved(plt, figure, file)


def sawtooth(trees: list[Found], file: Path) -> Path:
    """Live slots and confidence, step by step, of the first window; confidence over all."""
    plt = pyplot()
    figure, axes = panels(plt, 2 * len(trees), 2, (5.6, 2.4))
    for tree, (live, histogram) in zip(trees, [axes[i : i + 2] for i in range(0, len(axes), 2)]):
        trace, threshold = tree["trace"], tree["rule"]["threshold"]
        live.plot(trace["live"], color=COLOURS[0], lw=1.2, label="live slots a stream")
        live.set_ylim(0, 1.1 * max(trace["live"]))
        live.set_ylabel("live slots", fontsize=8)
        live.set_xlabel("step", fontsize=8)
        beside = live.twinx()
        beside.plot(trace["sure"], color=COLOURS[1], lw=0.6, alpha=0.7)
        beside.axhline(threshold, color=COLOURS[1], lw=0.8, ls=":")
        beside.set_ylim(0, 1)
        beside.set_ylabel("confidence", fontsize=8, color=COLOURS[1])
        live.set_title(f"{tree['task']} {tree['length']}: first window", fontsize=8)
        counts, edges = np.asarray(tree["histogram"]["counts"]), tree["histogram"]["edges"]
        histogram.stairs(counts / counts.sum(), edges, fill=True, color=COLOURS[1], alpha=0.7)
        histogram.axvline(threshold, color="k", lw=0.8, ls=":")
        sure = tree["entries"][0]["sure_share"]
        histogram.set_title(f"confidence under CONF-KV; {100 * sure:.0f} % of steps are sure", fontsize=8)
        histogram.set_xlabel("confidence", fontsize=8)
        for axis in (live, beside, histogram):
            axis.tick_params(labelsize=7)
    return saved(plt, figure, file)


def sweep(trees: list[Found], file: Path) -> Path:
    """Perplexity over mean live slots: constant budgets as a line, thresholds and tight budgets beside it."""
    plt = pyplot()
    figure, axes = panels(plt, len(trees), 2, (5.0, 3.4))
    for axis, tree in zip(axes, trees):
        line = tree["constant"]
        axis.plot(
            [c["live"] for c in line], np.exp([c["nll"] for c in line]), color="0.5", marker=".", lw=1,
            label="constant budget",
        )  # fmt: skip
        for number, kind in enumerate(("threshold", "tight")):
            entries = sorted(
                (e for e in tree["entries"] if e["name"].startswith(kind)), key=lambda e: e["live"]
            )
            x, y = [e["live"] for e in entries], [e["perplexity"] for e in entries]
            axis.plot(x, y, lw=0.7, ms=4, label=kind, **style(number))
            for e in entries:
                label = e["name"].removeprefix(kind + " ")
                axis.annotate(label, (e["live"], e["perplexity"]), fontsize=7, xytext=(-4, -11 + 15 * number),
                              textcoords="offset points")  # fmt: skip
        _label(axis, tree, "live slots a KV head, mean over steps")
    return saved(plt, figure, file)


def _label(axis: Any, tree: Found, across: str) -> None:
    """Words of a panel that shows perplexity."""
    axis.set_title(_title(tree), fontsize=8)
    axis.set_xlabel(across, fontsize=8)
    axis.set_ylabel("perplexity", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    axis.tick_params(labelsize=7)


def alpha(trees: list[Found], file: Path) -> Path:
    """Perplexity over alpha, with the default and the alpha below which the first token goes."""
    plt = pyplot()
    figure, axes = panels(plt, len(trees), 2, (5.0, 3.0))
    for axis, tree in zip(axes, trees):
        alphas = [e["rule"]["alpha"] for e in tree["entries"]]
        axis.plot(alphas, [e["perplexity"] for e in tree["entries"]], lw=1, ms=4, **style(0))
        axis.axvline(tree["default"], color="0.3", lw=1, label="default")
        axis.axvline(tree["cliff"], color="0.6", lw=1, ls="--", label="the first token goes below")
        axis.set_yscale("log")
        _label(axis, tree, "alpha: weight of attention, the rest is recency")
    return saved(plt, figure, file)
