"""All tables of a folder of results as one Markdown text."""

from __future__ import annotations

from kvjax.eval.measure.match import TOLERANCE
from kvjax.eval.measure.row import CHAT, Row
from kvjax.eval.report import table
from kvjax.eval.report.table import Results

WINDOW = frozenset({"window"})
"""Parts of the policy that a gap is measured from."""

LONG_ANSWERS = (
    "What is asked is given; the words asked for are the model's own, and it goes on behind them as it wrote "
    "them. Teacher-forced, the reference's stand there instead."
)


def text(results: Results) -> str:
    """All tables."""
    parts = ["# Results", _facts(results)]
    for group in dict.fromkeys(column[0] for column in results.columns()):
        parts += [f"## {group}", table.scores(results, group)]
    if answers := table.long_answers(results):
        parts += ["## Long answers", LONG_ANSWERS, answers]
    parts += ["## Difference from the full cache", table.losses(results)]
    if distances := table.distances(results):
        parts += ["## Distance from the full cache's distributions", distances]
    if pairs := table.matched(results):
        parts += ["## Learned policies at matched memory", pairs]
    if shares := closed(results):
        parts += ["## Gap between window and full that is closed", shares]
    parts += ["## What was held and read", table.costs(results)]
    return "\n\n".join(parts) + "\n"


def _facts(results: Results) -> str:
    row = results.rows[0]
    counts = sorted({r.cell.samples for r in results.rows})
    versions = ", ".join(f"{k} {v}" for k, v in row.versions.items())
    chat = any(r.cell.prompt == CHAT for r in results.rows)
    turns = "questions through the chat template; " if chat else ""
    return (
        f"Model {row.model}; texts: {row.data}; n = {', '.join(map(str, counts))} a cell, the same "
        f"samples for every policy; {turns}{versions}. Intervals are 95 % bootstrap (2,000 resamples). "
        "\\* marks cells in which the full cache reaches less than 80 %: they say nothing about a policy. "
        "Bytes are of one row when the answer begins. Reads are in tokens (K and V of one position in the "
        "model's dtype) per KV head and decode step: live slots and the completion's summary φ. What a "
        "selection reads to choose its slots has a column of its own; answer is the mean length of what was "
        "written, in tokens."
    )


def closed(results: Results) -> str:
    """Perplexity policies beside a window as large: (PPL_window - PPL) / (PPL_window - PPL_full).

    As large means as many bytes at the highest, or as many slots in the mean over the steps.
    """
    rows = results.where(lambda row: row.metric == "perplexity")
    lines = []
    for window in rows:
        full = results.full(window)
        if full is None or window.parts != WINDOW:
            continue
        for row in rows:
            matched = _matched(row, window)
            if row is not window and matched and (gap := table.gap(row, window, full)):
                share, low, high = (100 * x for x in gap)
                lines.append(
                    [
                        *(f"`{table.name(each)}`" for each in (row, window)),
                        row.cell.task,
                        row.cell.length,
                        matched,
                        " / ".join(f"{each.bytes.peak_live / 1024:.0f}" for each in (row, window)),
                        *(f"{table.value(each):.1f}" for each in (row, window, full)),
                        f"{share:.0f} ({low:.0f} … {high:.0f})",
                    ]
                )
    heads = ["policy", "window", "task", "length", "matched", "peak KiB", "ppl", "window's", "full's"]
    return table.markdown([*heads, "gap closed, %"], lines) if lines else ""


def _matched(row: Row, window: Row) -> str:
    """Whether their bytes or slots are within 2 %; "" where neither is."""
    if row.cell.drawn != window.cell.drawn:
        return ""
    if table.same_bytes(row, window):
        return "peak bytes"
    return "mean slots" if abs(row.mean_fraction / window.mean_fraction - 1) <= TOLERANCE else ""
