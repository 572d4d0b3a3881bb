"""All tables of a folder of results as one Markdown text."""

from __future__ import annotations

from kvjax.eval.measure.match import TOLERANCE
from kvjax.eval.measure.row import Row
from kvjax.eval.report import judges, table
from kvjax.eval.report.table import Results

WINDOW = judges.only("streaming-llm")
"""What a gap is measured from."""


def text(results: Results) -> str:
    """All tables."""
    parts = ["# Results", _facts(results)]
    for group in dict.fromkeys(column[0] for column in results.columns()):
        parts += [f"## {group}", table.scores(results, group)]
    parts += [
        "## Difference from the full cache",
        table.losses(results),
        *(["## Learned policies at matched memory", pairs] if (pairs := table.matched(results)) else []),
        *(["## Gap between window and full that is closed", shares] if (shares := closed(results)) else []),
        "## What was held and read",
        table.costs(results),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(results: Results) -> str:
    row = results.rows[0]
    counts = sorted({r.cell.samples for r in results.rows})
    versions = ", ".join(f"{k} {v}" for k, v in row.versions.items())
    return (
        f"Model {row.model}; texts: {row.data}; n = {', '.join(map(str, counts))} a cell, the same "
        f"samples for every policy; {versions}. Intervals are 95 % bootstrap (2,000 resamples). \\* marks "
        "cells in which the full cache reaches less than 80 %: they say nothing about a policy. Bytes are of "
        "one row when the answer begins. Reads are in tokens (K and V of one position in the model's dtype) "
        "per KV head and decode step: live slots and the completion's summary φ; what a selection looks at "
        "to choose its slots stands apart."
    )


def closed(results: Results) -> str:
    """Perplexity policies beside a window as large: (PPL_window - PPL) / (PPL_window - PPL_full).

    As many bytes at the highest, or, and then it says so, as many slots in the mean over the steps.
    """
    rows = results.where(lambda row: row.metric == "perplexity")
    lines = []
    for window in filter(WINDOW, rows):
        full = results.full(window)
        if full is None:
            continue
        for mine in rows:
            matched = _matched(mine, window)
            if mine is not window and matched and (found := table.gap(mine, window, full)):
                lines.append(_closing(mine, window, full, found, matched))
    heads = [
        "policy",
        "window",
        "task",
        "length",
        "matched",
        "peak KiB",
        "ppl",
        "window's",
        "full's",
        "gap closed, %",
    ]
    return table.markdown(heads, lines) if lines else ""


def _matched(mine: Row, window: Row) -> str:
    """Where their slots or bytes are within 2 %; nothing where they are not."""
    if table.samples(mine) != table.samples(window):
        return ""
    if table.same_bytes(mine, window):
        return "peak bytes"
    return "mean slots" if abs(mine.mean_fraction / window.mean_fraction - 1) <= TOLERANCE else ""


def _closing(mine: Row, window: Row, full: Row, found: tuple[float, float, float], matched: str) -> list[str]:
    share, low, high = (100 * x for x in found)
    cell, named = mine.cell, (f"`{table.name(row)}`" for row in (mine, window))
    held = " / ".join(f"{row.bytes.peak_live / 1024:.0f}" for row in (mine, window))
    values = (f"{table.value(row):.1f}" for row in (mine, window, full))
    return [
        *named,
        cell.task,
        str(cell.length),
        matched,
        held,
        *values,
        f"{share:.0f} ({low:.0f} … {high:.0f})",
    ]
