"""Plots of the model card. Needs matplotlib, which the caller has imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SMOOTH = 9
"""Log lines averaged for a point of a curve."""


def numbered(
    ax: Any, cells: np.ndarray, title: str, colours: str, across: str, most: float | None = None
) -> None:
    """A map of layers down and heads across, with each cell's number in it."""
    ax.imshow(cells, cmap=colours, aspect="auto", vmin=None if most is None else 0, vmax=most)
    for i, n in np.ndindex(cells.shape):
        bright = cells[i, n] > (cells.max() + cells.min()) / 2
        ax.text(n, i, f"{cells[i, n]:.0f}", ha="center", va="center", color="k" if bright else "w")
    ax.set(title=title, xlabel=across, ylabel="layer", xticks=range(cells.shape[1]), yticks=range(len(cells)))


def losses(ax: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Smoothed loss of all tokens and of text."""
    width = min(SMOOTH, len(lines))
    step = np.array([line["step"] for line in lines])[width // 2 :]
    for key, title in (("loss", "loss"), ("text_nll", "text, nats a token")):
        values = np.convolve([line[key] for line in lines], np.ones(width) / width, mode="valid")
        ax.plot(step[: len(values)], values, label=title)


def checks(ax: Any, lines: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> None:
    """Shares over the steps."""
    for name in names:
        have = [line for line in lines if name in line]
        ax.plot([x["step"] for x in have], [x[name] for x in have], label=name.replace("recall_", ""))
    ax.set(title=title, ylim=(-0.02, 1.02))


def bits(ax: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Bits a byte over the steps."""
    ax.plot([x["step"] for x in lines], [x["bits_per_byte"] for x in lines])
    ax.set(title="bits a byte, held-out books")


def levels(axes: Sequence[Any], lines: Sequence[dict[str, Any]]) -> None:
    """Grey lines where levels begin, and legends on all but the last."""
    begins = {line["level"]: line["step"] for line in reversed(lines)}
    for ax in axes:
        for begin in begins.values():
            ax.axvline(begin, color="0.85", lw=0.8, zorder=0)
        ax.set(xlabel="step (grey: a level begins)")
    for ax in axes[:-1]:
        ax.legend(fontsize=7)
