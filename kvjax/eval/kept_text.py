"""Which words did each policy keep? A text once a policy, every token as strong as it is still held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval import table
from kvjax.eval.plotting import DPI, pyplot, saved
from kvjax.eval.store import Row
from kvjax.eval.table import Results

WIDTH = 150
"""Characters of a line."""
PIXELS = 8
"""Width of a character: whole pixels, or rounding would push letters and shades apart."""
SIZE = PIXELS * 72 / DPI / 0.602
"""Of the letters, points; a character of the typeface is 0.602 of its size wide."""
TYPEFACE = "DejaVu Sans Mono"
MOST = 8
"""Policies of one picture."""


def example(results: Results) -> Row | None:
    """The full cache's row whose first text is shown: the first one with a marked answer and company."""
    for row in results.rows:
        others = [r for r in results.rows if table.samples(r) == table.samples(row) and r is not row]
        if any(row["example"].get("needed", ())) and others:
            return row
    return None


def draw(results: Results, shown: Row, file: Path) -> Path:
    """One block a policy, in a figure whose unit is a character."""
    plt = pyplot()
    rows = [r for r in results.rows if table.samples(r) == table.samples(shown) and r is not shown][:MOST]
    pieces = ["".join(c if c.isprintable() else " " for c in piece) for piece in shown["example"]["pieces"]]
    places = _places(pieces)
    block = places[-1][0] + 3  # a headline in front, a blank line behind
    lines = 2 + block * len(rows)
    figure = plt.figure(figsize=((WIDTH + 2) * PIXELS / DPI, lines * 2.1 * PIXELS / DPI))
    axis = figure.add_axes((0, 0, 1, 1))
    cell = shown["cell"]
    said = (
        f"{cell['task']}, {cell['length']} tokens, first sample. Green: share of layers and KV heads that "
        "hold a token. Grey: held by none. Underlined: holds the answer."
    )
    axis.text(0, 0.8, said, fontsize=SIZE, va="center")
    for number, row in enumerate(rows):
        _block(axis, row, shown["example"]["needed"], pieces, places, 2 + number * block)
    axis.set_xlim(-1, WIDTH + 1)
    axis.set_ylim(lines, 0)
    axis.axis("off")
    return saved(plt, figure, file)


def _places(pieces: list[str]) -> list[tuple[int, int]]:
    """(line, column) of each token; lines break in front of a token that does not fit."""
    found, line, column = [], 0, 0
    for piece in pieces:
        if column and column + len(piece) > WIDTH:
            line, column = line + 1, 0
        found.append((line, column))
        column += len(piece)
    return found


def _block(
    axis: Any, row: Row, needed: list[int], pieces: list[str], places: list[tuple[int, int]], top: int
) -> None:
    """A headline at line ``top``, the text below it."""
    streams = sum(len(layer) for layer in row["heads"])
    held = np.asarray(row["example"]["held"]) / streams
    shade = np.zeros((places[-1][0] + 1, WIDTH))
    written = [[[" "] * WIDTH for _ in shade] for _ in range(2)]  # held, gone
    marked = [*map(bool, needed), *[False] * len(pieces)]
    first = top + 1
    for piece, (line, column), share, answer in zip(pieces, places, held, marked):
        end = min(column + len(piece), WIDTH)
        shade[line, column:end] = share
        written[int(share == 0)][line][column:end] = piece[: end - column]
        if answer:
            axis.plot([column, end], [first + line + 0.94] * 2, color="#D55E00", lw=1.5)
    extent = (0, WIDTH, first + len(shade), first)
    axis.imshow(shade, cmap="Greens", vmin=0, vmax=1.6, extent=extent, aspect="auto")
    for texts, colour in zip(written, ("k", "0.55")):
        for line, letters in enumerate(texts):
            how = {"fontsize": SIZE, "family": TYPEFACE, "color": colour, "va": "center_baseline"}
            axis.text(0, first + line + 0.5, "".join(letters), parse_math=False, **how)
    kept = f"{table.name(row)}: kept {100 * row['kept_fraction']:.0f} %"
    axis.text(0, top + 0.5, kept, fontsize=SIZE, weight="bold", va="center")
