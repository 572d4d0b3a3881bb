"""``decode``: tokens a second of every side, a few tokens each in turns.

A prompt of random ids is read once in one row (and compressed at its end), then decoded from copies of that
row, as many as the batch has: speed asks how much is read, not what it says. Time to first token and peak
memory of whole batches: ``prefill``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.bench.child import Child, ChildError
from kvjax.bench.sides import NO_PEERS, WARM, Config, Settings

Row = dict[str, Any]


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
                loaded = lane.ask("load", folder=str(folder), dtype=dtype)
                lane.row |= {"versions": loaded.get("versions"), "rss_loaded": loaded.get("rss")}
            found.append(lane)
        yield found


def prompts(settings: Settings, rows: int, tokens: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(0, settings.spec.vocab_size, (rows, tokens)).tolist()


def measure(settings: Settings, folder: Path, done: Callable[[Row], None], tick: Callable[[], None]) -> None:
    """The table.

    Args:
      settings: what to measure.
      folder: the weights.
      done: given each row.
      tick: told after each prefill and each piece (``ticks`` of them).
    """
    for dtype in settings.dtypes:
        for context in settings.contexts:
            with lanes(settings, context, dtype, folder, quarter=True) as sides:
                for lane in sides:
                    ids = prompts(settings, 1, lane.row["prompt"])
                    lane.ask(
                        "prefill", spec=lane.config.spec, tokens=ids, new=settings.new, every=settings.tokens
                    )
                    tick()
                for batch in settings.batches:
                    for row in _in_turns(settings, sides, batch, tick):
                        done(row)


def ticks(settings: Settings) -> int:
    """How often ``measure`` will call ``tick``."""
    grid = len(settings.dtypes) * len(settings.contexts) * len(settings.configs(quarter=True))
    return grid * (1 + len(settings.batches) * (WARM + settings.rounds))


def _in_turns(settings: Settings, sides: list[Lane], batch: int, tick: Callable[[], None]) -> list[Row]:
    started = [lane.ask("start", rows=batch) for lane in sides]
    pieces: list[list[Row]] = [[] for _ in sides]
    for _ in range(WARM + settings.rounds):
        for lane, found in zip(sides, pieces):
            found.append(lane.ask("decode"))
            tick()
    ended = [lane.ask("bytes") for lane in sides]
    return [_row(lane, batch, *facts) for lane, facts in zip(sides, zip(started, pieces, ended))]


def _row(lane: Lane, batch: int, start: Row, pieces: list[Row], end: Row) -> Row:
    row = lane.row | {"batch": batch}
    if not end:
        return row | {"skipped": lane.reason}
    seconds = [piece["seconds"] for piece in pieces[WARM:]]
    tokens = pieces[-1]["tokens"]
    return row | {
        "tokens_per_s": round(tokens / statistics.median(seconds), 2),
        "tokens_timed": tokens * len(seconds),
        "piece_s": [round(s, 5) for s in seconds],
        "compile_s": round(sum(piece["compile_seconds"] for piece in pieces), 2),
        "live_bytes": start["live"],
        "allocated_bytes": start["allocated"],
        "live_bytes_end": end["live"],
        "allocated_bytes_end": end["allocated"],
        "temporary_bytes": end.get("temporary"),
    }
