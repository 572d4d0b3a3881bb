"""The most rows, the longest context; what would fit where the question does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax

from kvjax import catalogue
from kvjax.algebra import PolicyError
from kvjax.plan import _case as cases
from kvjax.plan._case import Case
from kvjax.plan._estimate import Known, bytes_like, largest, resident
from kvjax.sharding.mesh import Mesh, MeshError
from kvjax.sharding.specs import AXES, DATA
from pallas_kernels.measure.chips import Chip

STEP = 1024
"""Contexts are searched in steps of so many tokens."""

MOST_ROWS = 1 << 16
"""Rows beyond which no one looks."""


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
    """Of the grids that divide model and rows, the one with the fewest bytes a device; None: none does."""
    found = []
    for mesh in meshes(devices):
        on = dataclasses.replace(case, mesh=mesh)
        try:
            mesh.check("plan", rows=case.rows, heads=case.spec.num_heads, kv_heads=case.spec.num_kv_heads)
        except MeshError:
            continue
        found.append((resident(on).total, -mesh.size(DATA), repr(mesh), mesh))
    return min(found)[-1] if found else None


def fits(case: Case, known: Known, memory: int) -> bool:
    """Whether a device has room for a program that was compiled for a case like this one."""
    return bytes_like(case, known).total <= memory


def most_rows(case: Case, known: Known, memory: int) -> int:
    """Rows that fit at this context; 0 where not one row a device of ``data`` does."""
    data = case.mesh.size(DATA)
    with_rows = lambda times: dataclasses.replace(case, rows=times * data)  # noqa: E731
    return data * largest(lambda times: fits(with_rows(times), known, memory), MOST_ROWS // data)


def longest_context(case: Case, known: Known, memory: int) -> int:
    """Tokens that fit with so many rows, in steps of ``STEP`` or all that the model has positions for."""
    most = case.spec.max_positions
    within = lambda steps: dataclasses.replace(case, context=min(steps * STEP, most))  # noqa: E731
    return min(largest(lambda n: fits(within(n), known, memory), math.ceil(most / STEP)) * STEP, most)


def remedies(case: Case, known: Known, chip: Chip) -> list[str]:
    """What would fit where ``case`` does not, a way each, in words; nothing is compiled for it.

    Args:
      case: what does not fit.
      known: a step that was compiled.
      chip: the device.
    """
    found = []
    if rows := most_rows(case, known, chip.memory):
        found.append(f"--rows {rows}")
    if context := longest_context(case, known, chip.memory):
        found.append(f"--context {context}")
    if case.share is not None and (share := _share(case, known, chip.memory)):
        found.append(f"--share {share:g}")
    if more := _more_devices(case, known, chip):
        found.append(f"{more[0]} devices of {chip.name} ({more[1]!r})")
    if rows := _int8_rows(case, known, chip.memory):
        enough = "" if rows >= case.rows else f" with --rows {rows}"
        found.append(f"--policy '{case.policy!r} + int8'{enough}")
    return found


def _share(case: Case, known: Known, memory: int) -> float:
    """The largest share, in hundredths, that fits; 0 where none does."""
    most = math.floor(100 * (case.share or 0))
    keeping = lambda n: dataclasses.replace(case, share=n / 100)  # noqa: E731
    return largest(lambda n: fits(keeping(n), known, memory), most) / 100 if most else 0.0


def _more_devices(case: Case, known: Known, chip: Chip) -> tuple[int, Mesh] | None:
    devices = math.prod(case.mesh.size(axis) for axis in AXES)
    for times in (2, 4, 8, 16, 32, 64):
        mesh = best_mesh(case, devices * times)
        if mesh and fits(dataclasses.replace(case, mesh=mesh), known, chip.memory):
            return devices * times, mesh
    return None


def _int8_rows(case: Case, known: Known, memory: int) -> int:
    """The most rows with INT8 pages; 0 where the policy cannot have them."""
    if not case.policy.storage.idle:
        return 0
    try:
        policy = catalogue.policy(f"{case.policy!r} + int8")
    except PolicyError:
        return 0
    other = dataclasses.replace(case, policy=policy)
    cases.check(other)
    return most_rows(other, known, memory)
