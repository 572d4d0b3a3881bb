"""``prefill``: time to first token and peak memory of every side, whole batches, one call each in turns.

A call that takes longer than ``SLOW`` seconds is not repeated: its own seconds count, without those of
compiling, and its process ends before the next begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.decode import Advance, Cell, Side, cell, open_sides, prompts, todo
from benchmarks.results import Row
from benchmarks.sides import FULL, Comparison

__all__ = ["cell", "measure", "work"]

SLOW = 60.0


def measure(
    settings: Comparison,
    folder: Path,
    done: Callable[[list[Row]], None],
    advance: Advance,
    have: Collection[Cell],
) -> None:
    """Measures the table; arguments as in ``decode.measure``."""
    for dtype, context, batches in todo(settings, have):
        for batch in batches:
            with open_sides(settings, context, dtype, folder, quarter=False) as sides:
                done(_in_turns(settings, sides, batch, advance))


def work(settings: Comparison, have: Collection[Cell]) -> float:
    """All work of ``measure``."""
    return sum(
        (1 + settings.rounds) * settings.reading(batch, settings.prompt(context, config))
        for _, context, batches in todo(settings, have)
        for batch in batches
        for config in settings.configs(quarter=False)
    )


def _in_turns(settings: Comparison, sides: list[Side], batch: int, advance: Advance) -> list[Row]:
    firsts: list[Row] = []
    calls: list[list[Row]] = [[] for _ in sides]
    without: list[list[Row]] = [[] for _ in sides]
    ends: list[Row] = [{} for _ in sides]
    for at, side in enumerate(sides):
        firsts.append(_call(settings, side, batch))
        if firsts[-1].get("seconds", 0.0) > SLOW:
            ends[at] = side.ask("memory", forget=False)
            side.close("")
        else:
            side.ask("memory", forget=True)  # the peak of compiling is not the peak of reading
        advance(settings.reading(batch, side.row["prompt"]))
    for _ in range(settings.rounds):
        for side, answers in zip(sides, calls):
            answers += [call] if (call := _call(settings, side, batch)) else []
            advance(settings.reading(batch, side.row["prompt"]))
    for _ in range(settings.rounds + 1 if settings.products else 0):
        for side, answers in zip(sides, without):
            if side.config.spec == FULL and (call := _call(settings, side, batch, attention=False)):
                answers.append(call)
    ends = [end or side.ask("memory", forget=False) for side, end in zip(sides, ends)]
    rows = [_row(side, batch, *facts) for side, facts in zip(sides, zip(firsts, calls, ends))]
    for row, answers in zip(rows, without):
        if answers:  # the first of them compiles
            row["products_s"] = round(statistics.median(call["seconds"] for call in answers[1:]), 4)
    return rows


def _call(settings: Comparison, side: Side, batch: int, **more: bool) -> Row:
    ids = prompts(settings, batch, side.row["prompt"])
    how = {"spec": side.config.spec, "tokens": ids, "new": settings.new, "every": settings.tokens}
    return side.ask("prefill", **how, **more)


def _row(side: Side, batch: int, first: Row, calls: list[Row], end: Row) -> Row:
    row = side.row | {"batch": batch}
    base = row.pop("rss_loaded", None)
    row.pop("rss_before", None)
    if side.reason:
        return row | {"skipped": side.reason}
    seconds = [call["seconds"] for call in calls] or [first["seconds"] - first["compile_seconds"]]
    last, ttft = (calls or [first])[-1], statistics.median(seconds)
    peak = end.get("peak_rss")
    return row | {
        "ttft_s": round(ttft, 4),
        "prompt_tokens_per_s": round(batch * row["prompt"] / ttft, 1),
        "calls_s": [round(s, 4) for s in seconds],
        "cpu_s": round(min(call["cpu_seconds"] for call in calls), 4) if calls else None,
        "timed": "calls after the first" if calls else "first call, less compiling",
        "compile_s": round(first["compile_seconds"], 2),
        "live_bytes": last["live"],
        "allocated_bytes": last["allocated"],
        "peak_allocated_bytes": last.get("peak_allocated"),
        "temporary_bytes": last.get("temporary"),
        "peak_rss_growth_bytes": peak - base if peak is not None and base is not None else None,
    }
