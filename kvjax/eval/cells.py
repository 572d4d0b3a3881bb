"""Cells: what is to be measured, in the order in which it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.protocol import protocols
from kvjax.eval.sample import Task
from kvjax.loading import LanguageModel
from kvjax.types import Params
from kvjax.weights import Sources, find, sources

FULL = Policy()
"""The reference of every cell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One task at one length under one policy.

    Attributes:
      task: its name.
      length: L, tokens.
      policy: the one-string form that parses back to it.
      protocol: agnostic, aware or either.
      seed: of the samples.
      samples: how many.
      weights: learned ones of the policy, as ``kvjax.weights.Found.label`` names them.
    """

    task: str
    length: int
    policy: str
    protocol: str
    seed: int
    samples: int
    weights: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run measures.

    Attributes:
      cells: in order; the full cache stands in front of the other policies of its samples.
      policies: policy by its one-string form.
      skipped: (task, length) pairs in which a task does not fit, and from where on it does.
      weights: of learned policies, by (policy, weights) of a cell.
      remarks: on these weights, for whoever runs the plan.
    """

    cells: tuple[Cell, ...]
    policies: dict[str, Policy]
    skipped: tuple[tuple[str, int, int], ...]
    weights: dict[tuple[str, str], Params] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def plan(
    tasks: Sequence[Task],
    policies: Sequence[Policy],
    *,
    lengths: Sequence[int],
    seeds: Sequence[int],
    samples: int,
    asked: tuple[str, ...],
) -> Plan:
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
                for name, policy in everyone.items():
                    _check(task, policy, length)
                    cells += [
                        Cell(
                            task=task.name,
                            length=length,
                            policy=name,
                            protocol=how,
                            seed=seed,
                            samples=samples,
                        )
                        for how in protocols(policy, asked, task.asks)
                    ]
    if not cells:
        least = min(fits for _, _, fits in skipped)
        raise EvalError(
            f"--lengths {','.join(map(str, lengths))} is too short for every task asked for. "
            f"The first of them fits from {least} tokens on."
        )
    return Plan(cells=tuple(cells), policies=everyone, skipped=tuple(skipped))


def with_weights(plan: Plan, model: LanguageModel, given: Sources) -> Plan:
    """The plan with the learned weights of its policies.

    Args:
      plan: without any.
      model: may ship some.
      given: files, or names of shipped weights, by part.

    Raises:
      WeightsError: weights that are nowhere, do not fit, or are for no part of any policy.
    """
    everyone = plan.policies.values()
    found = {
        name: find(one, model, sources(one, given, others=everyone)) for name, one in plan.policies.items()
    }
    cells = [dataclasses.replace(cell, weights=found[cell.policy].label) for cell in plan.cells]
    return dataclasses.replace(
        plan,
        cells=tuple(cells),
        weights={(name, mine.label): mine.weights for name, mine in found.items() if mine.weights},
        remarks=tuple(remark for mine in found.values() for remark in mine.remarks),
    )


def joined(plans: Sequence[Plan]) -> Plan:
    """Several plans as one, each cell once; shorter lengths first, cells of the same samples together."""
    everything = dict.fromkeys(cell for one in plans for cell in one.cells)
    first: dict[tuple[str, int, int, int], int] = {}
    for cell in everything:
        first.setdefault((cell.task, cell.length, cell.seed, cell.samples), len(first))

    def place(cell: Cell) -> tuple[int, int]:
        return cell.length, first[cell.task, cell.length, cell.seed, cell.samples]

    return Plan(
        cells=tuple(sorted(everything, key=place)),
        policies={name: policy for one in plans for name, policy in one.policies.items()},
        skipped=tuple(skip for one in plans for skip in one.skipped),
        weights={key: weights for one in plans for key, weights in one.weights.items()},
    )


def _check(task: Task, policy: Policy, length: int) -> None:
    reason = task.refuse(policy, length)
    if reason is not None:
        raise EvalError(
            f"policy {str(policy)!r} is illegal for {task.name} at {length} tokens: {reason}. Give a smaller "
            "budget or window, or a larger --lengths."
        )
