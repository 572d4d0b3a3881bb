"""``decode``: tokens a second of every side, a few tokens each in turns.

A prompt of random ids is read once in one row (and compressed at its end), then decoded from copies of that
row, as many as the batch has: speed asks how much is read, not what it says. Time to first token and peak
memory of whole batches: ``prefill``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import Child, ChildError
from benchmarks.sides import NO_PEERS, WARM, Config, Settings
from kvjax.sharding.specs import DATA

Row = dict[str, Any]
Cell = tuple[str, int, int]


@dataclasses.dataclass
class Lane:
    """One side at one context and dtype: its process, or why there is none."""

    config: Config
    row: Row
    child: Child | None = None
    reason: str = ""

    def ask(self, do: str, **what: Any) -> Row:
        """The answer; empty once the side has failed or is absent."""
        if self.child is None:
            return {}
        try:
            return self.child.ask(do, **what)
        except ChildError as error:
            self.close(str(error))
            return {}

    def close(self, reason: str) -> None:
        """End the process; a reason says that it failed."""
        if self.child is not None:
            self.child.end()
        self.child, self.reason = None, reason


@contextlib.contextmanager
def lanes(settings: Settings, context: int, dtype: str, folder: Path, quarter: bool) -> Iterator[list[Lane]]:
    """Processes of all sides with the model loaded; peers without an environment have a reason instead."""
    found = []
    with contextlib.ExitStack() as stack:
        for config in settings.configs(quarter):
            row = {
                "system": config.system,
                "config": config.name,
                "context": context,
                "prompt": settings.prompt(context, config),
                "dtype": dtype,
                "threads": settings.threads,
            }
            lane = Lane(config, row)
            if config.system != "kvjax" and settings.peers is None:
                lane.reason = NO_PEERS
            else:
                lane.child = stack.enter_context(settings.open(config))
                given = {"mesh": settings.mesh} if config.system == "kvjax" and settings.mesh else {}
                loaded = lane.ask("load", folder=str(folder), dtype=dtype, **given)
                lane.row |= given
                lane.row |= {"versions": loaded.get("versions"), "rss_loaded": loaded.get("rss")}
            found.append(lane)
        yield found


def prompts(settings: Settings, rows: int, tokens: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(0, settings.spec.vocab_size, (rows, tokens)).tolist()


def cell(row: Row) -> Cell:
    """What is measured in turns and therefore kept or measured again as a whole."""
    return row["dtype"], row["context"], row["batch"]


def todo(settings: Settings, have: Collection[Cell]) -> list[tuple[str, int, list[int]]]:
    """(dtype, context, batches) of what is not yet measured."""
    found = []
    for dtype, context in itertools.product(settings.dtypes, settings.contexts):
        batches = [batch for batch in settings.batches if (dtype, context, batch) not in have]
        found += [(dtype, context, batches)] if batches else []
    return found


def measure(
    settings: Settings,
    folder: Path,
    done: Callable[[list[Row]], None],
    tick: Callable[[float], None],
    have: Collection[Cell],
) -> None:
    """The table.

    Args:
      settings: what to measure.
      folder: the weights.
      done: given the rows of a cell, in the order of ``Settings.configs``.
      tick: told the work of each prefill and each piece (``work`` in all).
      have: cells that are measured already.
    """
    for dtype, context, batches in todo(settings, have):
        with lanes(settings, context, dtype, folder, quarter=True) as sides:
            for lane in sides:
                # A row for each device along data: a mesh takes no fewer.
                ids = prompts(settings, 1, lane.row["prompt"]) * settings.grid.size(DATA)
                lane.ask(
                    "prefill", spec=lane.config.spec, tokens=ids, new=settings.new, every=settings.tokens
                )
                tick(settings.reading(1, lane.row["prompt"]))
            for batch in batches:
                done(_in_turns(settings, sides, batch, tick))


def work(settings: Settings, have: Collection[Cell]) -> float:
    """The sum of what ``measure`` will tell ``tick``."""
    total = 0.0
    for _, context, batches in todo(settings, have):
        for config in settings.configs(quarter=True):
            prompt = settings.prompt(context, config)
            pieces = sum(settings.writing(batch, prompt) for batch in batches)
            total += settings.reading(1, prompt) + (WARM + settings.rounds) * pieces
    return total


def _in_turns(settings: Settings, sides: list[Lane], batch: int, tick: Callable[[float], None]) -> list[Row]:
    started = [lane.ask("start", rows=batch) for lane in sides]
    pieces: list[list[Row]] = [[] for _ in sides]
    for _ in range(WARM + settings.rounds):
        for lane, found in zip(sides, pieces):
            found.append(lane.ask("decode"))
            tick(settings.writing(batch, lane.row["prompt"]))
    ended = [lane.ask("bytes") for lane in sides]
    return [_row(lane, batch, *facts) for lane, facts in zip(sides, zip(started, pieces, ended))]


def _latency(steps: list[float]) -> Row:
    """Of a step, in ms. A piece of several tokens counts with its mean: for true steps time pieces of one."""
    p50, p95 = np.percentile(steps, [50, 95])
    return {"step_ms_p50": round(1e3 * float(p50), 4), "step_ms_p95": round(1e3 * float(p95), 4)}


def _row(lane: Lane, batch: int, start: Row, pieces: list[Row], end: Row) -> Row:
    row = lane.row | {"batch": batch}
    row.pop("rss_loaded", None)
    if not end:
        return row | {"skipped": lane.reason}
    # A piece in which something was compiled says nothing of speed.
    timed = [piece for piece in pieces[WARM:] if not piece["compile_seconds"]]
    if not timed:
        return row | {"skipped": "something was compiled in every timed piece"}
    seconds = [piece["seconds"] for piece in timed]
    return row | {
        "tokens_per_s": round(timed[0]["tokens"] / statistics.median(seconds), 2),
        "tokens_timed": sum(piece["tokens"] for piece in timed),
        "piece_s": [round(s, 5) for s in seconds],
        **_latency([s * batch / piece["tokens"] for s, piece in zip(seconds, timed)]),
        "compile_s": round(sum(piece["compile_seconds"] for piece in pieces), 2),
        "live_bytes": start["live"],
        "allocated_bytes": start["allocated"],
        "live_bytes_end": end["live"],
        "allocated_bytes_end": end["allocated"],
        "temporary_bytes": end.get("temporary"),
    }
