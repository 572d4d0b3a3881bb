"""All tables of a folder of results as one Markdown text."""

from __future__ import annotations

from kvjax.eval import judges, table
from kvjax.eval.store import Row
from kvjax.eval.table import Results

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
    counts = sorted({r["cell"]["samples"] for r in results.rows})
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
    return (
        f"Model {row['model']}; texts: {row['data']}; n = {', '.join(map(str, counts))} a cell, the same "
        f"samples for every policy; {versions}. Intervals are 95 % bootstrap (2,000 resamples). \\* marks "
        "cells in which the full cache reaches less than 80 %: they say nothing about a policy. Bytes are of "
        "one row when the answer begins. Reads are in tokens (K and V of one position in the model's dtype) "
        "per KV head and decode step: live slots and the completion's summary φ; what a selection looks at "
        "to choose its slots stands apart."
    )


def closed(results: Results) -> str:
    """Perplexity policies beside a window of the same bytes: (PPL_window - PPL) / (PPL_window - PPL_full)."""
    rows = results.where(lambda row: row["metric"] == "perplexity")
    lines = []
    for window in filter(WINDOW, rows):
        full = results.full(window)
        if full is None:
            continue
        for mine in rows:
            same = table.samples(mine) == table.samples(window) and table.same_bytes(mine, window)
            if mine is not window and same and (found := table.gap(mine, window, full)):
                lines.append(_closing(mine, window, full, found))
    heads = ["policy", "window", "task", "length", "peak KiB", "ppl", "window's", "full's", "gap closed, %"]
    return table.markdown(heads, lines) if lines else ""


def _closing(mine: Row, window: Row, full: Row, found: tuple[float, float, float]) -> list[str]:
    share, low, high = (100 * x for x in found)
    cell, named = mine["cell"], (f"`{table.name(row)}`" for row in (mine, window))
    held = " / ".join(f"{row['bytes']['peak_live'] / 1024:.0f}" for row in (mine, window))
    values = (f"{table.value(row):.1f}" for row in (mine, window, full))
    return [*named, cell["task"], cell["length"], held, *values, f"{share:.0f} ({low:.0f} … {high:.0f})"]
