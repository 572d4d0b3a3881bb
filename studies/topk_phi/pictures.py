"""Pictures of what ``heads`` found, one a set of maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval.report.plotting import COLOURS, panels, pyplot, saved, style

Found = dict[str, Any]


def draw(tree: Found, file: Path) -> Path:
    """Errors by quarter of heads, gain over entropy, mass curves, φ's scores over the model's."""
    plt = pyplot()
    figure, axes = panels(plt, 10, 4, (3.1, 2.6))
    quarters, rest = axes[:4], axes[4:]
    counts = np.asarray(tree["counts"])
    for number, (axis, one) in enumerate(zip(quarters, tree["quartiles"])):
        reads = counts + tree["ends"]
        axis.plot(reads, one["alone"], lw=1, ms=4, label="selection", **style(0))
        axis.plot(reads + tree["summary"], one["completed"], lw=1, ms=4, label="with φ", **style(1))
        low, high = one["entropy"]
        axis.set_title(f"quarter {number + 1}: entropy {low:.2f} to {high:.2f}", fontsize=8)
        axis.set_xscale("symlog", linthresh=20)
        axis.set_ylim(bottom=0)
        _named(axis, "tokens read, φ's counted once", "relative error")
    quarters[0].legend(fontsize=7, frameon=False)
    by_head, at = tree["by_head"], _near(tree)
    entropy = np.asarray(by_head["entropy"])
    alone, completed = (np.asarray(by_head[n][at]) for n in ("alone", "completed"))
    for axis, y, name in zip(
        rest[:3], (alone, completed, alone - completed), ("error, selection", "error, with φ", "gain")
    ):
        axis.scatter(entropy, y, s=12, c=COLOURS[2])
        axis.axhline(0, color="0.6", lw=0.8, zorder=0)
        axis.set_title(f"{name}, K = {counts[at]}", fontsize=8)
        _named(axis, "entropy of the middle", name)
    for dots, number in zip(tree["dots"], range(3)):
        rest[3].plot(
            counts,
            [row[dots["head"]] for row in by_head["mass"]],
            lw=1,
            ms=4,
            label=f"entropy {dots['entropy']:.2f}",
            **style(number),
        )
        s, guess = np.reshape(dots["pairs"], (-1, 2)).T
        rest[4].scatter(s, guess, s=4, alpha=0.5, color=COLOURS[number])
    ends = rest[4].get_xlim()
    rest[4].plot(ends, ends, color="0.4", lw=0.8)
    rest[3].legend(fontsize=7, frameon=False)
    rest[3].set_title("what the best tokens hold", fontsize=8)
    _named(rest[3], "tokens", "share of the middle's mass")
    rest[4].set_title("scores of the same three heads", fontsize=8)
    _named(rest[4], "the model's score", "φ's score")
    rest[5].scatter(entropy, by_head["share"], s=12, c=COLOURS[3])
    rest[5].set_title("φ's share of the whole mass", fontsize=8)
    _named(rest[5], "entropy of the middle", "share")
    return saved(plt, figure, file)


def _near(tree: Found) -> int:
    """The count nearest to a hundredth of the prompt."""
    return int(np.argmin(np.abs(np.asarray(tree["counts"]) - 0.01 * tree["prompt"])))


def _named(axis: Any, across: str, up: str) -> None:
    axis.set_xlabel(across, fontsize=8)
    axis.set_ylabel(up, fontsize=8)
    axis.tick_params(labelsize=7)
