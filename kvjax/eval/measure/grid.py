"""Cells: what is to be measured, in the order in which it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure.protocol import protocols
from kvjax.eval.measure.row import Cell
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
      cells: in order; the full cache stands in front of the other policies.
      policies: policy by its one-string form.
      skipped: (task, length) pairs in which a task does not fit, and from where on it does.
      weights: of learned policies, by (policy, weights) of a cell.
      remarks: on these weights, to be shown before it is measured.
    """

    cells: tuple[Cell, ...]
    policies: dict[str, Policy]
    skipped: tuple[tuple[str, int, int], ...]
    weights: dict[tuple[str, str], Params] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def build(
    tasks: Sequence[Task],
    policies: Sequence[Policy],
    *,
    lengths: Sequence[int],
    seeds: Sequence[int],
    samples: int,
    asked: tuple[str, ...],
) -> Grid:
    """All cells, length by length; tasks that do not fit a length are left out of it.

    Raises:
      EvalError: a policy that says nothing on a task, or no cell at all.
    """
    everyone = {repr(policy): policy for policy in (FULL, *policies)}
    cells: list[Cell] = []
    skipped = []
    for length in lengths:
        for task in tasks:
            if task.fits > length:
                skipped.append((task.name, length, task.fits))
                continue
            for seed in seeds:
                here = {"task": task.name, "length": length, "seed": seed, "samples": samples}
                for name, policy in everyone.items():
                    _check(task, policy, length)
                    for how in protocols(policy, asked, task.asks):
                        cells.append(Cell(**here, policy=name, protocol=how))  # type: ignore[arg-type]
    if not cells:
        least = min(fits for _, _, fits in skipped)
        raise EvalError(
            f"--lengths {','.join(map(str, lengths))} is too short for every task asked for. "
            f"The first of them fits from {least} tokens on."
        )
    return Grid(cells=tuple(cells), policies=everyone, skipped=tuple(skipped))


def with_weights(grid: Grid, model: LanguageModel, given: Sources) -> Grid:
    """The grid with the learned weights of its policies.

    Args:
      grid: without any.
      model: may ship some.
      given: files, or names of shipped weights, by part.

    Raises:
      WeightsError: weights that are nowhere, do not fit, or are for no part of any policy.
    """
    every = grid.policies.values()
    found = {name: find(one, model, sources(one, given, others=every)) for name, one in grid.policies.items()}
    cells = [dataclasses.replace(cell, weights=found[cell.policy].label) for cell in grid.cells]
    return dataclasses.replace(
        grid,
        cells=tuple(cells),
        weights={(name, mine.label): mine.weights for name, mine in found.items() if mine.weights},
        remarks=tuple(remark for mine in found.values() for remark in mine.remarks),
    )


def joined(grids: Sequence[Grid]) -> Grid:
    """Several grids as one, each cell once: shorter lengths first, at each length program by program.

    The full cache comes first, since it is the first policy of every grid. Policies that cut a prompt which
    was read whole come prompt by prompt, so that each is read once for all of them. Of the others, cells that
    share compiled programs follow each other.
    """
    cells = dict.fromkeys(cell for one in grids for cell in one.cells)
    policies = {name: policy for one in grids for name, policy in one.policies.items()}
    samples: dict[tuple[str, int, int, int], int] = {}
    for cell in cells:
        samples.setdefault(cell.drawn, len(samples))
    shared: dict[Hashable, int] = {}
    cutting = {name for name, policy in policies.items() if decode.cuts_after(policy)}
    turn = {
        name: (shared.setdefault(programs(policy), len(shared)), at)
        for at, (name, policy) in enumerate(policies.items())
    }

    first = min((turn[name][0] for name in cutting), default=0)

    def place(cell: Cell) -> tuple[Any, ...]:
        program, at = turn[cell.policy]
        block = first if cell.policy in cutting else program
        return cell.length, block, samples[cell.drawn], cell.protocol, program, at

    return Grid(
        cells=tuple(sorted(cells, key=place)),
        policies=policies,
        skipped=tuple(skip for one in grids for skip in one.skipped),
        weights={key: weights for one in grids for key, weights in one.weights.items()},
    )


def programs(policy: Policy) -> Hashable:
    """What policies share that run the same compiled programs: all but their dials."""
    return jax.tree.structure(policy)


def _check(task: Task, policy: Policy, length: int) -> None:
    reason = task.refuse(policy, length)
    if reason is not None:
        raise EvalError(
            f"policy {str(policy)!r} is illegal for {task.name} at {length} tokens: {reason}. Give a smaller "
            "budget or window, or a larger --lengths."
        )
