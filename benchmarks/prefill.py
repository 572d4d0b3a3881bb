"""``prefill``: time to first token and peak memory of every side, whole batches, one call each in turns.

A call that takes longer than ``SLOW`` seconds is not repeated: its own seconds count, less what JAX spent
compiling, and its process ends before the next begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.decode import Cell, Lane, Row, cell, lanes, prompts, todo
from benchmarks.sides import Settings

__all__ = ["cell", "measure", "work"]

SLOW = 20.0


def measure(
    settings: Settings,
    folder: Path,
    done: Callable[[list[Row]], None],
    tick: Callable[[float], None],
    have: Collection[Cell],
) -> None:
    """The table; arguments as in ``decode.measure``."""
    for dtype, context, batches in todo(settings, have):
        for batch in batches:
            with lanes(settings, context, dtype, folder, quarter=False) as sides:
                done(_in_turns(settings, sides, batch, tick))


def work(settings: Settings, have: Collection[Cell]) -> float:
    """The sum of what ``measure`` will tell ``tick``."""
    return sum(
        (1 + settings.rounds) * settings.reading(batch, settings.prompt(context, config))
        for _, context, batches in todo(settings, have)
        for batch in batches
        for config in settings.configs(quarter=False)
    )


def _in_turns(settings: Settings, sides: list[Lane], batch: int, tick: Callable[[float], None]) -> list[Row]:
    firsts: list[Row] = []
    calls: list[list[Row]] = [[] for _ in sides]
    ends: list[Row] = [{} for _ in sides]
    for at, lane in enumerate(sides):
        firsts.append(_call(settings, lane, batch))
        if firsts[-1].get("seconds", 0.0) > SLOW:
            ends[at] = lane.ask("memory", forget=False)
            lane.close("")
        else:
            lane.ask("memory", forget=True)  # the peak of compiling is not the peak of reading
        tick(settings.reading(batch, lane.row["prompt"]))
    for _ in range(settings.rounds):
        for lane, found in zip(sides, calls):
            found += [call] if (call := _call(settings, lane, batch)) else []
            tick(settings.reading(batch, lane.row["prompt"]))
    ends = [end or lane.ask("memory", forget=False) for lane, end in zip(sides, ends)]
    return [_row(lane, batch, *facts) for lane, facts in zip(sides, zip(firsts, calls, ends))]


def _call(settings: Settings, lane: Lane, batch: int) -> Row:
    ids = prompts(settings, batch, lane.row["prompt"])
    return lane.ask("prefill", spec=lane.config.spec, tokens=ids, new=settings.new, every=settings.tokens)


def _row(lane: Lane, batch: int, first: Row, calls: list[Row], end: Row) -> Row:
    row = lane.row | {"batch": batch}
    base = row.pop("rss_loaded", None)
    if lane.reason:
        return row | {"skipped": lane.reason}
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
