"""A suite's rows as cells: one task at one size class of lengths under one policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.grid import FULL, Grid
from kvjax.eval.measure.protocol import protocols
from kvjax.eval.measure.row import CHAT, RAW, Cell
from kvjax.eval.suites import prompt
from kvjax.eval.suites.suite import Row, Suite
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.sample import Samples, length
from kvjax.eval.tasks.task import Task
from kvjax.text import Text


@dataclasses.dataclass(frozen=True)
class Source(Data):
    """Where a suite's rows came from, as result rows say it."""

    name: str = ""

    @property
    def source(self) -> str:
        return self.name


def source(name: str) -> Source:
    """The data of a suite."""
    return Source(folder=None, name=name)


def spelled(specs: Sequence[str], ratios: Sequence[float]) -> list[str]:
    """The policies that are written with {}, once for each ratio: the share of a prompt that is removed.

    In place of {} stands the share that is kept. Policies without {} stay as they are.
    """
    return [
        spec.replace("{}", f"{1 - ratio:g}")
        for spec in specs
        for ratio in (ratios if "{}" in spec else (0.0,))
    ]


def chosen(rows: Sequence[Row], each: int | None) -> dict[str, list[int]]:
    """Indices of the rows of each task, by name: all, or the first so many."""
    by_task: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_task.setdefault(row["task"], []).append(index)
    return {task: found[:each] for task, found in sorted(by_task.items())}


def samples(
    suite: Suite, rows: Sequence[Row], each: int | None, text: Text, *, chat: bool, aware: bool, most: int
) -> dict[tuple[str, int], Samples]:
    """The samples, by task and size class of their length.

    Args:
      suite, rows: of the data set.
      each: samples of a task; None takes all.
      text: the model's tokenizer.
      chat, aware, most: as in ``prompt.encoded``.
    """
    found: dict[tuple[str, int], Samples] = {}
    for task, indices in chosen(rows, each).items():
        for i in indices:
            one = prompt.encoded(suite, rows[i], i, text, chat=chat, aware=aware, most=most)
            size = decode.bucket(length(one[1], one[0].max_new), most)
            found.setdefault((task, size), []).append(one)
    return found


def build(
    suite: Suite,
    drawn: dict[tuple[str, int], Samples],
    policies: Sequence[Policy],
    *,
    chat: bool,
    aware: bool,
) -> Grid:
    """The cells: the full cache and every policy on all samples.

    Raises:
      EvalError: a policy that would keep every token of the shortest samples.
    """
    named = {repr(policy): policy for policy in (FULL, *policies)}
    tasks = {name: _task(suite, name, drawn) for name, _ in drawn}
    cells = []
    for (name, size), own in drawn.items():
        for label, policy in named.items():
            if reason := tasks[name].refuse(policy, size):
                raise EvalError(
                    f"policy {label!r} is illegal for {name} at {size} tokens: {reason}. Give a smaller "
                    "budget or window."
                )
            (how,) = protocols(policy, ("aware" if aware else "agnostic",), question=True)
            cells.append(
                Cell(
                    task=name,
                    length=size,
                    policy=label,
                    protocol=how,
                    seed=0,
                    samples=len(own),
                    prompt=CHAT if chat else RAW,
                )
            )
    return Grid(cells=tuple(cells), policies=named, skipped=(), tasks=tasks)


def _task(suite: Suite, name: str, drawn: dict[tuple[str, int], Samples]) -> Task:
    """A task of a suite; the names of its classes are not labels to be ranked, but the score knows them."""
    return Task(
        name=name,
        group=suite.name,
        fits=0,
        read=lambda size: drawn[name, size],
        score=lambda output, sample: suite.score(name, output, sample.refs, sample.classes),
        newline=False,
        free=suite.free,
    )
