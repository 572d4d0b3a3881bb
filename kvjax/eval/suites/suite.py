"""The suites by name: which data set, which columns it must have, how its rows are scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.eval.errors import EvalError
from kvjax.eval.suites import longbench, mathematics, ruler

Row = Mapping[str, Any]
"""A row of a data set, by column."""

RATIOS = (0.25, 0.5, 0.75, 0.875)
"""Shares of a prompt that kvpress's leaderboard removes (its leaderboard.sh)."""

TEXTS = (str, list)
"""Types of a column of references: one text, or several."""

_PROMPT: dict[str, tuple[type, ...]] = {
    "context": (str,),
    "question": (str,),
    "answer_prefix": (str,),
    "max_new_tokens": (int,),
    "task": (str,),
}
"""Columns of every data set of kvpress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark whose samples are read, not made.

    Attributes:
      name: as ``--suite`` takes it.
      dataset: of the hub.
      folders: of the data set, one or more; every one has the files ``test-*.parquet``.
      benchmark: kvpress's name of it, for its layout of results.
      references: the column of right answers; ``classes`` the one of labels, if there is one.
      answers: types of the values of that column.
      task: of all rows, in a data set that has no such column.
      free: as ``kvjax.eval.tasks.task.Task.free``.
      score: (task, output, references, classes) to [0, 1].
      totals: scores of each task, by task, to what kvpress's ``metrics.json`` holds.
    """

    name: str
    dataset: str
    folders: tuple[str, ...]
    benchmark: str
    references: str
    score: Callable[[str, str, Sequence[str], Sequence[str]], float]
    totals: Callable[[Mapping[str, Sequence[float]]], Any]
    classes: str | None = None
    answers: tuple[type, ...] = TEXTS
    task: str | None = None
    free: bool = False

    @property
    def columns(self) -> dict[str, tuple[type, ...]]:
        """Columns that its rows must have, and the types of their values."""
        optional: dict[str, tuple[type, ...]] = {self.classes: (list, type(None))} if self.classes else {}
        return _PROMPT | {self.references: self.answers} | optional

    def refs(self, row: Row) -> tuple[str, ...]:
        """The right answers of a row."""
        refs = row[self.references]
        return tuple(map(str, refs)) if isinstance(refs, list) else (str(refs),)

    def labels(self, row: Row) -> tuple[str, ...]:
        """The names of all classes of a row; () where there are none."""
        return tuple(row[self.classes] or ()) if self.classes else ()


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _by_task(scores: Mapping[str, Sequence[float]]) -> Any:
    """As kvpress's ``ruler``: percent of each task, to two decimals."""
    return {task: {"string_match": round(_mean(own) * 100, 2)} for task, own in sorted(scores.items())}


def _percent(scores: Mapping[str, Sequence[float]]) -> Any:
    """As kvpress's ``longbench``, whose runs have one task each: percent, to two decimals."""
    by_task = {task: round(100 * _mean(own), 2) for task, own in sorted(scores.items())}
    return next(iter(by_task.values())) if len(by_task) == 1 else by_task


def _share(scores: Mapping[str, Sequence[float]]) -> Any:
    """As kvpress's ``longbench-v2``: the share that is right."""
    return _mean([score for own in scores.values() for score in own])


def _correct(scores: Mapping[str, Sequence[float]]) -> Any:
    """As kvpress's ``aime25`` and ``math500``, without how many outputs have a box."""
    every = [score for own in scores.values() for score in own]
    return {"correct": int(sum(every)), "accuracy": _mean(every), "total": len(every)}


def _mathematics(name: str) -> Suite:
    """Problems with long answers. Their context is a blank: policies act while the answer is written."""
    return Suite(
        name=name,
        dataset=f"alessiodevoto/{name}",
        folders=("data",),
        benchmark=name,
        references="answer",
        answers=(str, int),
        task=name,
        free=True,
        score=lambda task, output, refs, classes: mathematics.score(output, refs),
        totals=_correct,
    )


def _ruler(size: int) -> Suite:
    return Suite(
        name=f"kvpress-ruler-{size // 1024}k",
        dataset="simonjegou/ruler",
        folders=(str(size),),
        benchmark="ruler",
        references="answer",
        score=lambda task, output, refs, classes: ruler.kvpress(task, output, refs),
        totals=_by_task,
    )


SUITES = {
    suite.name: suite
    for suite in (
        *(_ruler(size) for size in (4096, 8192, 16384)),
        Suite(
            name="longbench",
            dataset="Xnhyacinth/LongBench",
            folders=tuple(longbench.SCORES),
            benchmark="longbench",
            references="answers",
            classes="all_classes",
            score=longbench.kvpress,
            totals=_percent,
        ),
        Suite(
            name="longbench-v2",
            dataset="simonjegou/LongBench-v2",
            folders=("0shot",),
            benchmark="longbench-v2",
            references="answer",
            score=lambda task, output, refs, classes: longbench.letter(output, refs[0]),
            totals=_share,
        ),
        *map(_mathematics, ("aime25", "math500")),
    )
}
"""By name. ``longbench-NAME`` is one task of LongBench."""


def named(name: str) -> Suite:
    """The suite of a name.

    Raises:
      EvalError: there is none.
    """
    if name in SUITES:
        return SUITES[name]
    task = name.removeprefix("longbench-")
    if task in longbench.SCORES and task != name:
        return dataclasses.replace(SUITES["longbench"], name=name, folders=(task,))
    raise EvalError(
        f"--suite {name} is not known. Give one of {', '.join(SUITES)}, or longbench-TASK with one of "
        f"{', '.join(longbench.SCORES)}."
    )
