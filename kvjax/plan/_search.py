"""The best mesh, the most rows, the longest context; what would fit where a deployment does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax

from kvjax import catalogue
from kvjax.algebra import PolicyError
from kvjax.plan._deployment import Deployment, check
from kvjax.plan._estimate import bytes_like, resident
from kvjax.plan._programs import Compiled
from kvjax.sharding.mesh import Mesh, MeshError
from kvjax.sharding.specs import AXES, DATA
from pallas_kernels.measure.chips import Chip

STEP = 1024
"""Contexts are searched in steps of so many tokens."""

MOST_ROWS = 1 << 16
"""The search for the most rows ends here."""


def meshes(devices: int) -> Iterator[Mesh]:
    """All meshes of so many devices, which need not be here."""
    for tensor in range(1, devices + 1):
        for context in range(1, devices // tensor + 1):
            if devices % (tensor * context) == 0:
                yield abstract(devices // (tensor * context), tensor, context)


def abstract(data: int, tensor: int, context: int) -> Mesh:
    """A mesh of devices that are not here, for questions of size."""
    return Mesh(jax.sharding.AbstractMesh((data, tensor, context), AXES))  # type: ignore[arg-type]


def best_mesh(case: Deployment, devices: int) -> Mesh | None:
    """The mesh with the fewest bytes a device, of those that divide model and rows; None if there is none."""
    candidates = []
    for mesh in meshes(devices):
        sharded = dataclasses.replace(case, mesh=mesh)
        try:
            sharded.check_mesh()
        except MeshError:
            continue
        candidates.append((resident(sharded).total, -mesh.size(DATA), repr(mesh), mesh))
    return min(candidates)[-1] if candidates else None


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where smaller ones fit too; 0 if none does."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(case: Deployment, compiled: Compiled, memory: int) -> bool:
    """Whether a device has room for a program that was compiled for a similar deployment."""
    return bytes_like(case, compiled).total <= memory


def most_rows(case: Deployment, compiled: Compiled, memory: int) -> int:
    """Rows that fit at this context; 0 if not even one row per device of ``data`` does."""
    data = case.mesh.size(DATA)
    with_rows = lambda times: dataclasses.replace(case, rows=times * data)  # noqa: E731
    return data * largest(lambda times: fits(with_rows(times), compiled, memory), MOST_ROWS // data)


def longest_context(case: Deployment, compiled: Compiled, memory: int) -> int:
    """Tokens that fit with these rows, in steps of ``STEP``, up to the model's positions."""
    most = case.spec.max_positions
    within = lambda steps: dataclasses.replace(case, context=min(steps * STEP, most))  # noqa: E731
    return min(largest(lambda n: fits(within(n), compiled, memory), math.ceil(most / STEP)) * STEP, most)


def remedies(case: Deployment, compiled: Compiled, chip: Chip) -> list[str]:
    """Changes in words, each of which alone makes a deployment fit; nothing is compiled for them.

    Args:
      case: what does not fit.
      compiled: a step.
      chip: the device.
    """
    ways = []
    if rows := most_rows(case, compiled, chip.memory):
        ways.append(f"--rows {rows}")
    if context := longest_context(case, compiled, chip.memory):
        ways.append(f"--context {context}")
    if case.share is not None and (share := _share(case, compiled, chip.memory)):
        ways.append(f"--share {share:g}")
    devices = math.prod(case.mesh.size(axis) for axis in AXES)
    for more in (devices * times for times in (2, 4, 8, 16, 32, 64)):
        mesh = best_mesh(case, more)
        if mesh and fits(dataclasses.replace(case, mesh=mesh), compiled, chip.memory):
            ways.append(f"{more} devices of {chip.name} ({mesh!r})")
            break
    if rows := _int8_rows(case, compiled, chip.memory):
        enough = "" if rows >= case.rows else f" with --rows {rows}"
        ways.append(f"--policy '{case.policy!r} + int8'{enough}")
    return ways


def _share(case: Deployment, compiled: Compiled, memory: int) -> float:
    """The largest share, in hundredths, that fits; 0 if none does."""
    most = math.floor(100 * (case.share or 0))
    keeping = lambda n: dataclasses.replace(case, share=n / 100)  # noqa: E731
    return largest(lambda n: fits(keeping(n), compiled, memory), most) / 100 if most else 0.0


def _int8_rows(case: Deployment, compiled: Compiled, memory: int) -> int:
    """The most rows with INT8 pages; 0 if the policy cannot have them."""
    if not case.policy.storage.idle:
        return 0
    try:
        policy = catalogue.policy(f"{case.policy!r} + int8")
    except PolicyError:
        return 0
    other = dataclasses.replace(case, policy=policy)
    check(other)
    return most_rows(other, compiled, memory)
