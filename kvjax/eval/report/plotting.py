"""What all pictures share: matplotlib without a display, colours that everybody can distinguish, panels."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.errors import EvalError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
"""After Okabe and Ito, https://jfly.uni-koeln.de/color/, and one more; markers differ where those repeat."""

MARKERS = "osD^vPX*<>"

DPI = 110


INSTALL = "Pictures need matplotlib, which is not installed. In the checkout: pip install -e '.[plot]'"


def available() -> bool:
    """Can pictures be drawn?"""
    return importlib.util.find_spec("matplotlib") is not None


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
      EvalError: matplotlib is not installed.
    """
    if not available():
        raise EvalError(INSTALL)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def style(number: int) -> dict[str, Any]:
    """Colour and marker of the curve of that number; eighty are different."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def wrapped(policy: str, width: int) -> str:
    """The name in lines of this width."""
    return "\n".join(textwrap.wrap(policy, width, break_on_hyphens=False))


def panels(
    plt: Any, count: int, across: int, size: tuple[float, float], *, top: float = 0
) -> tuple[Any, list[Any]]:
    """A figure and its first ``count`` panels, at most ``across`` in a row; the others are empty.

    ``size`` is in inches of a panel, ``top`` the inches above them.
    """
    across = max(1, min(across, count))
    down = -(-count // across)
    figure, axes = plt.subplots(
        down, across, figsize=(size[0] * across, size[1] * down + top), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.axis("off")
    return figure, flat[:count]


def map_of(axis: Any, grid: Any, names: Sequence[Sequence[Any]], title: str) -> Any:
    """A grid of percents, 0 to 100; its numbers are written into small grids."""
    import numpy as np

    image = axis.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    if grid.size <= 80:
        for (i, j), value in np.ndenumerate(grid):
            text, colour = ("–", "k") if np.isnan(value) else (f"{value:.0f}", "w" if value < 65 else "k")
            axis.text(j, i, text, ha="center", va="center", fontsize=9, color=colour)
    for labels, set_ticks in zip(names, (axis.set_yticks, axis.set_xticks)):
        step = max(1, len(labels) // 12)
        set_ticks(range(0, len(labels), step), labels[::step], fontsize=8)
    axis.set_title(title, fontsize=8)
    return image


def bar(figure: Any, image: Any, axes: Sequence[Any], label: str) -> None:
    """A colour bar for all maps."""
    scale = figure.colorbar(image, ax=axes, shrink=0.8, aspect=15)
    scale.set_label(label, fontsize=8)
    scale.ax.tick_params(labelsize=8)


def saved(plt: Any, figure: Any, file: Path) -> Path:
    """Writes the figure; the file."""
    figure.savefig(file, dpi=DPI)
    plt.close(figure)
    return file
