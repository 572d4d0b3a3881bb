"""Measuring a grid batch by batch: policies that cut after the prompt share one reading of each batch.

What is measured is on disk at once: a finished cell as its row, a batch of an unfinished one beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.decode import PromptActivations
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import batch
from kvjax.eval.measure.grid import FULL, Grid
from kvjax.eval.measure.row import CHAT, RAW, Cell, Row
from kvjax.eval.measure.store import Store
from kvjax.eval.measure.tally import row
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Samples, encode
from kvjax.eval.tasks.task import Task
from kvjax.loading import LanguageModel
from kvjax.programs import maps_taken

TOKENS = 32_768
"""Most tokens of a batch; a whole-prompt prefill holds them at once."""

CROWDED = 0.5
"""Programs are dropped when this share of a process's memory maps is taken; one policy takes hundredths."""


@dataclasses.dataclass
class References:
    """Logits of the full cache, kept for the policies that are compared with it; the oldest go.

    Attributes:
      most: bytes to keep.
      kept: by what was fed, the latest used at the end.
    """

    most: int = 2**30
    kept: dict[Hashable, jax.Array] = dataclasses.field(default_factory=dict)

    def of(self, key: Hashable, make: Callable[[], jax.Array]) -> jax.Array:
        """The logits under this key; ``make`` makes them if they are not there."""
        logits = self.kept.pop(key, None)
        if logits is None:
            logits = make()
        while self.kept and sum(one.nbytes for one in self.kept.values()) + logits.nbytes > self.most:
            self.kept.pop(next(iter(self.kept)))
        self.kept[key] = logits
        return logits


def draw(
    task: Task,
    model: LanguageModel,
    data: Data,
    *,
    length: int,
    seed: int,
    count: int,
    chat: bool = False,
) -> Samples:
    """The samples of a cell: the same for every policy, each from a generator of its own, or read.

    With ``chat`` they are put through the model's chat template, whose tokens count towards ``length``.

    Raises:
      EvalError: data that has no generated twin is missing, or nothing fits.
    """
    if task.read is not None:
        return task.read(length)
    assert task.make is not None
    for name in task.needs:
        data.raw(name)
    drawn: Samples = []
    for i in range(count):
        rng = np.random.default_rng((zlib.crc32(task.name.encode()), length, seed, i))
        sample = task.make(rng, Maker(text=model.text, data=data, length=length, index=i, chat=chat))
        drawn.append((sample, encode(model.text, sample, chat=chat)))
    return drawn


def most_rows(length: int) -> int:
    """Rows of a batch, where nobody planned them for the device."""
    return max(1, min(64, TOKENS // length))


def batched(
    samples: Samples, length: int, most: Callable[[int], int] = most_rows
) -> tuple[int, list[Samples]]:
    """(rows of every batch, the batches): as few as the memory of one allows, of nearly one size."""
    most_of_one = most(length)
    count = -(-len(samples) // most_of_one)
    rows = -(-len(samples) // count)
    return rows, [samples[i : i + rows] for i in range(0, len(samples), rows)]


def run(
    grid: Grid,
    model: LanguageModel,
    data: Data,
    store: Store,
    *,
    say: Callable[[str], None] = lambda line: None,
    shown: bool | None = None,
    most: Callable[[int], int] = most_rows,
) -> None:
    """Measures every cell that is not finished yet.

    Args:
      grid: the cells.
      model, data: what is measured, and where texts come from.
      store: finished cells, and where new ones go.
      say: called with one line a finished cell.
      shown: a bar on standard error; None shows it to terminals.
      most: rows of a batch by length.

    Raises:
      EvalError: a length the model was not made for, or a store that has the task asked the other way.
    """
    from tqdm import tqdm

    longest = max(cell.length for cell in grid.cells)
    if longest > model.network.max_positions:
        raise EvalError(
            f"--lengths {longest} exceeds the {model.network.max_positions} positions that {model.name} was "
            "trained for. Give shorter lengths or another --model."
        )
    done = store.done()
    _check_prompts(grid, done, store)
    full = {cell.drawn: finished for cell, finished in done.items() if cell.policy == repr(FULL)}
    work = [cell for cell in grid.cells if cell not in done]
    hidden = not (sys.stderr.isatty() if shown is None else shown)
    total = sum(cell.length * cell.samples for cell in work)
    drawn: dict[tuple[str, int, int, int, str], Samples] = {}
    shared = sum(decode.cuts_after(policy) for policy in grid.policies.values()) > 1
    references = References()
    with tqdm(total=total, unit="token", unit_scale=True, file=sys.stderr, disable=hidden) as bar:
        for block in blocks(work, grid.policies):
            first = block[0]
            task = grid.task(first.task)
            if any(length != first.length for _, length, *_ in drawn):
                drawn.clear()
            if first.drawn not in drawn:
                drawn[first.drawn] = draw(
                    task,
                    model,
                    data,
                    length=first.length,
                    seed=first.seed,
                    count=first.samples,
                    chat=first.prompt == CHAT,
                )
            samples = drawn[first.drawn]
            bar.set_description(f"{first.task} {first.length}")
            parts = (block, samples, grid, model, store, references, shared, most, bar.update)
            for cell, batches in _finished(*parts):
                policy, whole = grid.policies[cell.policy], full.get(cell.drawn)
                finished = row(cell, task, policy, model, samples, batches, whole, data.source)
                store.append(finished)
                if policy == FULL:
                    full[cell.drawn] = finished
                say(_line(finished))


def blocks(cells: Sequence[Cell], policies: Mapping[str, Policy]) -> list[list[Cell]]:
    """Neighbours whose policies cut the same prompts after one reading; other cells by themselves."""

    def key(cell: Cell) -> Hashable:
        return (cell.drawn, cell.protocol) if decode.cuts_after(policies[cell.policy]) else cell

    return [list(block) for _, block in itertools.groupby(cells, key)]


def _check_prompts(grid: Grid, done: Iterable[Cell], store: Store) -> None:
    """One folder asks a task in one way, or its tables would mix both."""
    wanted = {cell.task: cell.prompt for cell in grid.cells}
    for cell in done:
        if wanted.get(cell.task, cell.prompt) != cell.prompt:
            ways = {CHAT: "through the chat template", RAW: "in bare words (--raw)"}
            raise EvalError(
                f"{store.folder} holds results of {cell.task} asked {ways[cell.prompt]}, and this run asks "
                f"{ways[wanted[cell.task]]}. Give another --out."
            )


def forget() -> None:
    """Drops compiled programs: each holds memory maps, of which a process may have only so many."""
    jax.clear_caches()


def _finished(
    block: Sequence[Cell],
    samples: Samples,
    grid: Grid,
    model: LanguageModel,
    store: Store,
    references: References,
    shared: bool,
    most: Callable[[int], int],
    tick: Callable[[int], object],
) -> Iterator[tuple[Cell, list[batch.Batch]]]:
    """Each cell of a block with its batches, when the last one is measured; the others are kept on disk."""
    first = block[0]
    rows, parts = batched(samples, first.length, most)
    context = decode.bucket(first.length, model.network.max_positions)
    for at, part in enumerate(parts):
        make: dict[str, Any] = {"model": model, "samples": part, "protocol": first.protocol}
        make |= {"context": context, "rows": rows}
        reading = None
        for cell in block:
            measured = store.unfinished(cell, rows, at)
            if measured is None:
                if maps_taken() > CROWDED:
                    forget()
                cuts = decode.cuts_after(grid.policies[cell.policy])
                if shared and cuts and reading is None:
                    reading = batch.read(**make)
                measured = _measured(cell, at, make, grid, reading if cuts else None, references)
                if at + 1 < len(parts):
                    store.keep(cell, rows, at, measured)
            tick(len(part) * cell.length)
            if at + 1 == len(parts):
                earlier = (store.unfinished(cell, rows, i) for i in range(at))
                yield cell, [*filter(None, earlier), measured]


def _measured(
    cell: Cell,
    at: int,
    make: dict[str, Any],
    grid: Grid,
    reading: PromptActivations | None,
    references: References,
) -> batch.Batch:
    """The ``at``-th batch of a cell."""
    reference = None
    if grid.task(cell.task).compares:
        reference = references.of((cell.drawn, at), functools.partial(batch.reference, **make))
    return batch.run(
        policy=grid.policies[cell.policy],
        weights=grid.weights.get((cell.policy, cell.weights)),
        reading=reading,
        reference=reference,
        long=grid.task(cell.task).long,
        free=grid.task(cell.task).free,
        **make,
    )


def _line(finished: Row) -> str:
    """A finished cell for people."""
    cell = finished.cell
    value = (
        f"ppl {finished.perplexity:8.2f}" if finished.score is None else f"score {100 * finished.score:6.1f}"
    )
    mark = "" if finished.informative else "  (not informative: full cache below 80 %)"
    held = "" if finished.span_retention is None else f"  spans {100 * finished.span_retention:5.1f} %"
    return (
        f"{cell.task:<18} {cell.length:>5} {cell.policy:<44} {cell.protocol:<8} {value}  "
        f"nll {finished.nll:6.3f}  kept {100 * finished.kept_fraction:5.1f} %{held}{mark}"
    )
