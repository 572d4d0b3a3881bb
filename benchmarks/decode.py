"""``decode``: tokens a second of every side, a few tokens each in turns.

A prompt of random ids is read once in one row (and compressed at its end); each row of the batch decodes from
a copy of it, because speed does not depend on what the tokens are. ``prefill`` measures the time to first
token and the peak memory of whole batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np

from benchmarks.child import Child, ChildError
from benchmarks.results import Row
from benchmarks.sides import NO_PEERS, WARM, Comparison, Config
from kvjax.sharding.specs import DATA

Cell = tuple[str, int, int]
Advance = Callable[[float], None]


@dataclasses.dataclass
class Side:
    """One side at one context and dtype: its process, or the reason why it has none."""

    config: Config
    row: Row
    child: Child | None = None
    reason: str = ""

    def ask(self, do: str, **values: object) -> Row:
        """The answer; empty if the side has failed or is absent."""
        if self.child is None:
            return {}
        try:
            return self.child.ask(do, **values)
        except ChildError as error:
            self.close(str(error))
            return {}

    def close(self, reason: str) -> None:
        """Ends the process; a reason that is not empty means that it failed."""
        if self.child is not None:
            self.child.end()
        self.child, self.reason = None, reason


@contextlib.contextmanager
def open_sides(
    settings: Comparison, context: int, dtype: str, folder: Path, quarter: bool
) -> Iterator[list[Side]]:
    """Processes of all sides with the model loaded; peers without an environment have a reason instead."""
    sides = []
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
            side = Side(config, row)
            if config.system != "kvjax" and settings.peers is None:
                side.reason = NO_PEERS
            elif config.system == "kvpress" and settings.fill:
                side.reason = "presses compress a prompt, and only the full cache is filled"
            else:
                side.child = stack.enter_context(settings.open(config))
                how = {"mesh": settings.mesh if config.system == "kvjax" else None}
                how |= {"weight_dtype": config.weight_dtype}
                how = {name: value for name, value in how.items() if value is not None}
                before = side.ask("memory", forget=False)
                loaded = side.ask("load", folder=str(folder), dtype=dtype, **how)
                side.row |= how | {"rss_before": before.get("rss", 0)}
                side.row |= {"versions": loaded.get("versions"), "rss_loaded": loaded.get("rss")}
            sides.append(side)
        yield sides


def prompts(settings: Comparison, rows: int, tokens: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = np.random.default_rng(settings.seed)
    return draw.integers(0, settings.spec.vocab_size, (rows, tokens)).tolist()


def cell(row: Row) -> Cell:
    """What is measured in turns and therefore kept or measured again as a whole."""
    return row["dtype"], row["context"], row["batch"]


def todo(settings: Comparison, have: Collection[Cell]) -> list[tuple[str, int, list[int]]]:
    """(dtype, context, batches) of what is not yet measured."""
    cells = []
    for dtype, context in itertools.product(settings.dtypes, settings.contexts):
        batches = [batch for batch in settings.batches if (dtype, context, batch) not in have]
        cells += [(dtype, context, batches)] if batches else []
    return cells


def measure(
    settings: Comparison,
    folder: Path,
    done: Callable[[list[Row]], None],
    advance: Advance,
    have: Collection[Cell],
) -> None:
    """Measures the table.

    Args:
      settings: what to measure.
      folder: the weights.
      done: called with the rows of a cell, in the order of ``Comparison.configs``.
      advance: called with the work of each prefill and each piece; the sum is ``work``.
      have: cells that are measured already.
    """
    for dtype, context, batches in todo(settings, have):
        with open_sides(settings, context, dtype, folder, quarter=True) as sides:
            for side in sides:
                # A row for each device along data: a mesh takes no fewer.
                ids = prompts(settings, 1, side.row["prompt"]) * settings.grid.size(DATA)
                how = {"spec": side.config.spec, "tokens": ids, "new": settings.new, "every": settings.tokens}
                side.ask("fill" if settings.fill else "prefill", **how)
                advance(settings.reading(1, side.row["prompt"]))
            for batch in batches:
                done(_in_turns(settings, sides, batch, advance))


def work(settings: Comparison, have: Collection[Cell]) -> float:
    """All work of ``measure``."""
    total = 0.0
    for _, context, batches in todo(settings, have):
        for config in settings.configs(quarter=True):
            prompt = settings.prompt(context, config)
            pieces = sum(settings.writing(batch, prompt) for batch in batches)
            total += settings.reading(1, prompt) + (WARM + settings.rounds) * pieces
    return total


def _in_turns(settings: Comparison, sides: list[Side], batch: int, advance: Advance) -> list[Row]:
    started = [side.ask("start", rows=batch) for side in sides]
    pieces: list[list[Row]] = [[] for _ in sides]
    for _ in range(WARM + settings.rounds):
        for side, answers in zip(sides, pieces):
            answers.append(side.ask("decode"))
            advance(settings.writing(batch, side.row["prompt"]))
    ended = [side.ask("bytes") | side.ask("memory", forget=False) for side in sides]
    return [_row(side, batch, *facts) for side, facts in zip(sides, zip(started, pieces, ended))]


def _row(side: Side, batch: int, start: Row, pieces: list[Row], end: Row) -> Row:
    row = side.row | {"batch": batch}
    row.pop("rss_loaded", None)
    before = row.pop("rss_before", 0)
    if not end:
        return row | {"skipped": side.reason}
    # A piece in which something was compiled says nothing about speed.
    timed = [piece for piece in pieces[WARM:] if not piece["compile_seconds"]]
    if not timed:
        return row | {"skipped": "something was compiled in every timed piece"}
    seconds = [piece["seconds"] for piece in timed]
    # A piece of several tokens counts with its mean; pieces of one token give the latency of single steps.
    p50, p95 = np.percentile([s * batch / piece["tokens"] for s, piece in zip(seconds, timed)], [50, 95])
    return row | {
        "tokens_per_s": round(timed[0]["tokens"] / statistics.median(seconds), 2),
        "tokens_timed": sum(piece["tokens"] for piece in timed),
        "piece_s": [round(s, 5) for s in seconds],
        "step_ms_p50": round(1e3 * float(p50), 4),
        "step_ms_p95": round(1e3 * float(p95), 4),
        "compile_s": round(sum(piece["compile_seconds"] for piece in pieces), 2),
        "live_bytes": start["live"],
        "allocated_bytes": start["allocated"],
        "live_bytes_end": end["live"],
        "allocated_bytes_end": end["allocated"],
        "temporary_bytes": end.get("temporary"),
        "resident_bytes": end["rss"] - before if "rss" in end else None,
    }
