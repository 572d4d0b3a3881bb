"""Cells: what is to be measured, in the order in which it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.protocol import LONG, protocols
from kvjax.eval.measure.row import CHAT, Cell
from kvjax.eval.tasks import tasks as all_tasks
from kvjax.eval.tasks.task import Task
from kvjax.loading import LanguageModel
from kvjax.types import Params
from kvjax.weights import Sources, find, sources

FULL = Policy()
"""The reference of every cell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Everything a run measures.

    Attributes:
      cells: in order; the full cache before the other policies.
      policies: policy by its one-string form.
      skipped: (task, length, length from which the task fits) where a task does not fit.
      weights: of learned policies, by (policy, weights) of a cell.
      remarks: about these weights, to be shown before anything is measured.
      tasks: those that are not in ``kvjax.eval.tasks``, by name.
    """

    cells: tuple[Cell, ...]
    policies: dict[str, Policy]
    skipped: tuple[tuple[str, int, int], ...]
    weights: dict[tuple[str, str], Params] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    tasks: dict[str, Task] = dataclasses.field(default_factory=dict)

    def task(self, name: str) -> Task:
        """The task of a cell."""
        return self.tasks.get(name) or all_tasks()[name]


def build(
    tasks: Sequence[Task],
    policies: Sequence[Policy],
    *,
    lengths: Sequence[int],
    seeds: Sequence[int],
    samples: int,
    protocol: tuple[str, ...],
) -> Grid:
    """All cells, length by length; a task that does not fit a length is left out there.

    Raises:
      EvalError: a policy that would change nothing on a task, or no cell at all.
    """
    named = {repr(policy): policy for policy in (FULL, *policies)}
    cells: list[Cell] = []
    skipped = []
    for length in lengths:
        for task in tasks:
            if task.fits > length:
                skipped.append((task.name, length, task.fits))
                continue
            for policy in named.values():
                if reason := task.refuse(policy, length):
                    raise EvalError(
                        f"policy {str(policy)!r} is illegal for {task.name} at {length} tokens: {reason}. "
                        "Give a smaller budget or window, or a larger --lengths."
                    )
            cells += [
                Cell(task=task.name, length=length, policy=name, protocol=how, seed=seed, samples=samples)
                for seed in seeds
                for name, policy in named.items()
                for how in protocols(policy, protocol, question=task.asks, long=task.long)
            ]
    if not cells and protocol == (LONG,) and len(skipped) < len(lengths) * len(tasks):
        raise EvalError(
            f"--protocol {LONG} is that of tasks with long answers, and {tasks[0].name} has none. Name "
            "another protocol, or --task long."
        )
    if not cells:
        least = min(fits for _, _, fits in skipped)
        raise EvalError(
            f"--lengths {','.join(map(str, lengths))} is too short for every task asked for. "
            f"The first of them fits from {least} tokens on."
        )
    return Grid(cells=tuple(cells), policies=named, skipped=tuple(skipped))


def as_turns(grid: Grid) -> Grid:
    """The grid with its questions put through the chat template.

    A text that only goes on stays as it is: there are no turns to take.
    """
    asks = {name: task.asks for name, task in all_tasks().items()}
    cells = (dataclasses.replace(cell, prompt=CHAT) if asks[cell.task] else cell for cell in grid.cells)
    return dataclasses.replace(grid, cells=tuple(cells))


def with_weights(grid: Grid, model: LanguageModel, chosen: Sources) -> Grid:
    """The grid with the learned weights of its policies.

    Args:
      grid: without weights.
      model: may ship some.
      chosen: files, or names of shipped weights, by part.

    Raises:
      WeightsError: weights that do not exist, do not fit, or are for no part of any policy.
    """
    policies = grid.policies.values()
    learned = {
        name: find(policy, model, sources(policy, chosen, others=policies))
        for name, policy in grid.policies.items()
    }
    return dataclasses.replace(
        grid,
        cells=tuple(dataclasses.replace(cell, weights=learned[cell.policy].label) for cell in grid.cells),
        weights={(name, found.label): found.weights for name, found in learned.items() if found.weights},
        remarks=tuple(remark for found in learned.values() for remark in found.remarks),
    )


def joined(grids: Sequence[Grid]) -> Grid:
    """Several grids as one, each cell once: shorter lengths first, at each length program by program.

    The full cache comes first, since it is the first policy of every grid. Policies that cut a prompt after
    it was read whole come prompt by prompt, so that each prompt is read once for all of them. Among the
    others, cells that share compiled programs follow each other.
    """
    cells = dict.fromkeys(cell for grid in grids for cell in grid.cells)
    policies = {name: policy for grid in grids for name, policy in grid.policies.items()}
    samples: dict[Hashable, int] = {}
    for cell in cells:
        samples.setdefault(cell.drawn, len(samples))
    # Policies of one structure share compiled programs: only their traced numbers differ.
    programs: dict[Hashable, int] = {}
    order = {
        name: (programs.setdefault(jax.tree.structure(policy), len(programs)), at)
        for at, (name, policy) in enumerate(policies.items())
    }
    cutting = {name for name, policy in policies.items() if decode.cuts_after(policy)}
    first_cut = min((order[name][0] for name in cutting), default=0)

    def key(cell: Cell) -> tuple[Any, ...]:
        program, at = order[cell.policy]
        block = first_cut if cell.policy in cutting else program
        return cell.length, block, samples[cell.drawn], cell.protocol, program, at

    return Grid(
        cells=tuple(sorted(cells, key=key)),
        policies=policies,
        skipped=tuple(skip for grid in grids for skip in grid.skipped),
        weights={key: weights for grid in grids for key, weights in grid.weights.items()},
        tasks={name: task for grid in grids for name, task in grid.tasks.items()},
    )
