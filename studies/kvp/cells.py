"""In how many cells a ranking is at the top of those that see no attention, at matched bytes.

python -m studies.kvp.cells results/kvp

A cell is a task, a length, a protocol, samples and slots. Top: alone, or with others. Within: the paired
interval of the ranking less the best of the others does not lie below 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.eval.measure.row import Cell, Row
from kvjax.eval.measure.store import read
from kvjax.eval.report import stats, table
from studies import judges


@dataclasses.dataclass(frozen=True)
class Count:
    """Cells; of them alone at the top, tied there, and within the interval of the top."""

    cells: int
    alone: int
    tied: int
    within: int


def count(rows: Sequence[Row], weights: str = "default") -> Count:
    """Of the accuracy cells of KVP with these weights."""
    scored = [row for row in rows if row.metric != "perplexity"]
    named = [row for row in scored if row.cell.weights.partition("@")[0] == weights]
    own = [row for row in named if judges.only("kvp")(row)]
    rivals = [row for row in scored if judges.attention_free(row)]
    pairs = judges.best_rivals(own, rivals, table.same_bytes)
    highs = [stats.difference(table.quality(a), table.quality(b))[2] for a, b in pairs]
    return Count(
        cells=len(pairs),
        alone=sum(table.value(a) > table.value(b) for a, b in pairs),
        tied=sum(table.value(a) == table.value(b) for a, b in pairs),
        within=sum(high >= 0 for high in highs),
    )


def _named(cell: Cell) -> Cell:
    """The cell, whatever file its weights were read from."""
    return dataclasses.replace(cell, weights=cell.weights.partition("@")[0])


def main(words: Sequence[str] | None = None) -> int:
    """Prints the counts; the exit code."""
    return cli.run(_run, words)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.kvp.cells", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+", help="of results; later rows of a cell count")
    parser.add_argument("--weights", default="default", metavar="NAME", help="default: default")
    values = parser.parse_args(words)
    rows = {_named(row.cell): row for folder in values.folder for row in read(folder)}
    counted = count(list(rows.values()), values.weights)
    print(
        f"{counted.cells} cells: alone at the top {counted.alone}, tied {counted.tied}; at the top or within "
        f"its interval {counted.within} ({100 * counted.within / max(counted.cells, 1):.0f} %)"
    )


if __name__ == "__main__":
    cli.start(main)
