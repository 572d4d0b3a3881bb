"""Every task by name or group."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence

from kvjax.eval.errors import EvalError
from kvjax.eval.tasks.data import PACK, Data
from kvjax.eval.tasks.task import Task

ORDER = ("niah", "ruler", "babilong", "ppl", "text", "dialogue", "icl", "rerank", "mqar", "gsm", "long")
"""Groups, in the order of reports."""


@functools.cache
def tasks() -> dict[str, Task]:
    """Every task of every module of this package, group by group."""
    modules = [importlib.import_module(info.name) for info in pkgutil.iter_modules(__path__, __name__ + ".")]
    every: list[Task] = [task for module in modules for task in getattr(module, "TASKS", ())]
    return {task.name: task for task in sorted(every, key=lambda task: ORDER.index(task.group))}


def named(words: Sequence[str], data: Data) -> tuple[list[Task], list[Task]]:
    """The tasks of a list of names and groups, each once; a word that is both is the name.

    Returns:
      (tasks, tasks of a group that are left out because their data is missing).

    Raises:
      EvalError: a word that is neither; a task named by itself whose data is missing.
    """
    known = tasks()
    chosen: dict[str, Task] = {}
    absent: dict[str, Task] = {}
    for word in words:
        group = [known[word]] if word in known else [task for task in known.values() if task.group == word]
        if not group:
            raise EvalError(
                f"there is no task {word!r}. Groups: {', '.join(ORDER)}; tasks: {', '.join(known)}."
            )
        for task in group:
            missing = [file for file in task.needs if not data.has(file)]
            if missing and word == task.name:
                raise EvalError(
                    f"task {word} needs {missing[0]}, which is not there and has no generated twin. It comes "
                    f"with {PACK}."
                )
            (absent if missing else chosen)[task.name] = task
    if not chosen:
        raise EvalError(f"no data for {', '.join(absent)}. It comes with {PACK}.")
    return list(chosen.values()), list(absent.values())
