"""The most rows, the longest context; what would fit where the question does not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax

from kvjax import catalogue
from kvjax.algebra import PolicyError
from kvjax.cache.mesh import AXES, DATA, Mesh, MeshError
from kvjax.plan import _case as cases
from kvjax.plan._case import Case
from kvjax.plan._estimate import largest, like, resident
from kvjax.plan._programs import Program
from pallas_kernels.measure.chips import Chip

STEP = 1024
"""Contexts are searched in steps of so many tokens."""

MOST_ROWS = 1 << 16
"""Rows beyond which no one looks."""

Total = Callable[[Case], int]
"""Bytes of one device during a step of a case."""


def meshes(devices: int) -> Iterator[Mesh]:
    """All ways to lay so many devices in a grid; they need not be here."""
    for tensor in range(1, devices + 1):
        for context in range(1, devices // tensor + 1):
            if devices % (tensor * context) == 0:
                yield abstract(devices // (tensor * context), tensor, context)


def abstract(data: int, tensor: int, context: int) -> Mesh:
    """A mesh of devices that are not here, for questions of size."""
    grid = jax.sharding.AbstractMesh((data, tensor, context), AXES)
    return Mesh(grid)  # type: ignore[arg-type]


def best_mesh(case: Case, devices: int) -> Mesh | None:
    """Of the grids that divide the model and the rows, the one with the fewest bytes a device; None: none does."""
    found = []
    for mesh in meshes(devices):
        on = dataclasses.replace(case, mesh=mesh)
        try:
            mesh.check("plan", rows=case.rows, heads=case.spec.num_heads, kv_heads=case.spec.num_kv_heads)
        except MeshError:
            continue
        found.append((resident(on).total, -mesh.size(DATA), repr(mesh), mesh))
    return min(found)[-1] if found else None


def most_rows(case: Case, total: Total, memory: int) -> int:
    """Rows that fit at this context; 0 where not one row a device of ``data`` does."""
    data = case.mesh.size(DATA)

    def fits(times: int) -> bool:
        return total(dataclasses.replace(case, rows=times * data)) <= memory

    return data * largest(fits, MOST_ROWS // data)


def longest_context(case: Case, total: Total, memory: int) -> int:
    """Tokens that fit with so many rows, in steps of ``STEP`` or all that the model has positions for."""
    most = case.spec.max_positions

    def fits(steps: int) -> bool:
        return total(dataclasses.replace(case, context=min(steps * STEP, most))) <= memory

    return min(largest(fits, math.ceil(most / STEP)) * STEP, most)


def remedies(case: Case, known: Case, step: Program, chip: Chip) -> list[str]:
    """What would fit where ``case`` does not, a way each, in words; nothing is compiled for it.

    Args:
      case: what does not fit.
      known, step: a case whose step was compiled.
      chip: the device.
    """
    total = functools.partial(like, known=known, step=step)
    found = []
    if rows := most_rows(case, total, chip.memory):
        found.append(f"--rows {rows}")
    if context := longest_context(case, total, chip.memory):
        found.append(f"--context {context}")
    if case.share is not None and (share := _share(case, total, chip.memory)):
        found.append(f"--share {share:g}")
    if more := _more_devices(case, known, step, chip):
        found.append(f"{more[0]} devices of {chip.name} ({more[1]!r})")
    if rows := _int8_rows(case, total, chip.memory):
        enough = "" if rows >= case.rows else f" with --rows {rows}"
        found.append(f"--policy '{case.policy!r} + int8'{enough}")
    return found


def _share(case: Case, total: Total, memory: int) -> float:
    """The largest share, in hundredths, that fits; 0 where none does."""
    most = math.floor(100 * (case.share or 0))
    fits = lambda n: total(dataclasses.replace(case, share=n / 100)) <= memory  # noqa: E731
    return largest(fits, most) / 100 if most else 0.0


def _more_devices(case: Case, known: Case, step: Program, chip: Chip) -> tuple[int, Mesh] | None:
    devices = math.prod(case.mesh.size(axis) for axis in AXES)
    for times in (2, 4, 8, 16, 32, 64):
        mesh = best_mesh(case, devices * times)
        if mesh and like(dataclasses.replace(case, mesh=mesh), known, step) <= chip.memory:
            return devices * times, mesh
    return None


def _int8_rows(case: Case, total: Total, memory: int) -> int:
    """The most rows with INT8 pages; 0 where the policy cannot have them."""
    if not case.policy.storage.idle:
        return 0
    try:
        policy = catalogue.policy(f"{case.policy!r} + int8")
    except PolicyError:
        return 0
    other = dataclasses.replace(case, policy=policy)
    cases.check(other)
    return most_rows(other, total, memory)
