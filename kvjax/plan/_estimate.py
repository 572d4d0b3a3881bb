"""What one device holds, loads and sends, from shapes and a compiled program; the largest that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from kvjax import catalogue
from kvjax.algebra import PolicyError
from kvjax.cli import InputError
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment, check
from kvjax.plan._programs import Compiled
from kvjax.sharding.mesh import Mesh, MeshError
from kvjax.sharding.specs import AXES, DATA
from pallas_kernels.measure.chips import GIB, Chip

STEP = 1024
"""Contexts are searched in steps of so many tokens."""

MOST_ROWS = 1 << 16
"""The search for the most rows ends here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one device.

    Attributes:
      weights: of the model.
      learned: weights of the policy.
      allocated: the state, free pages and tables included.
      live: of it, what holds a token; on the fullest device.
      padding: what the device's layouts add.
      temporary: between operations, with results that reuse no argument.
      code: of the program.
      host: in host memory, full pages; not of the device.
      index, cached: of what is allocated, what selections choose these pages by, and the caches of them.
      linked: over the link to host memory: what a step chooses of these pages, of which it brings what the
        device's cache has not; or all of them, which each piece of a prompt brings.
    """

    weights: int
    learned: int
    allocated: int
    live: int
    padding: int = 0
    temporary: int = 0
    code: int = 0
    host: int = 0
    index: int = 0
    cached: int = 0
    linked: int = 0

    @property
    def total(self) -> int:
        """All that has to fit."""
        return self.weights + self.learned + self.allocated + self.padding + self.temporary + self.code


def resident(case: Deployment, *, reading: bool = False) -> Bytes:
    """What stays between two steps; ``reading``: while prompts are read."""
    layers = shapes.layer_sizes(case, reading=reading)
    return Bytes(
        weights=shapes.device_bytes(shapes.params(case)),
        learned=shapes.device_bytes(shapes.weights(case)),
        allocated=sum(layer.allocated for layer in layers),
        live=sum(layer.live for layer in layers),
        host=sum(layer.host for layer in layers),
        index=sum(layer.index for layer in layers),
        cached=sum(layer.cached for layer in layers),
        linked=sum(layer.brought if reading else layer.chosen for layer in layers),
    )


def refuse_large_index(case: Deployment) -> None:
    """Raises InputError: what a selection chooses by takes more than half of what host memory spares."""
    held = resident(case)
    if held.index > held.host / 2:
        raise InputError(
            f"--policy '{case.policy!r}': on each device {held.index / GIB:.2f} GiB would stay that "
            f"{case.policy.selection!r} chooses by, {100 * held.index / held.host:.0f} % of the "
            f"{held.host / GIB:.2f} GiB that host memory spares; more than half is not worth it. Choose "
            "larger units, for example quest(chunk=64), or leave host out."
        )


def bytes_like(case: Deployment, compiled: Compiled) -> Bytes:
    """What a device holds while a program runs that was compiled for a similar deployment.

    What lies between operations is assumed to grow with rows and context, padding with the state.
    """
    times = case.device_rows / compiled.case.device_rows * max(case.context / compiled.case.context, 1.0)
    between = (compiled.program.temporary + compiled.program.outputs) * times
    if compiled.reading:  # the input of a layer exists beside its output
        between += case.device_rows * case.read_at_once * case.spec.model_dim * case.itemsize
        between += shapes.full_cache(case) if case.policy.holds_prompt else 0
    held = resident(case, reading=compiled.reading)
    return dataclasses.replace(
        held,
        padding=round(compiled.padding * held.allocated),
        temporary=round(between),
        code=compiled.program.code,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time of a decode step on one device, from its published limits; waiting is not counted.

    Attributes:
      weights, cache: bytes it must load.
      walked: bytes of the cache that this program loads; more than ``cache`` where a read walks whole pools.
      sent: bytes it sends to others.
      flops: products and sums.
      seconds: at least, by bytes and sums that cannot be avoided.
      compiled_seconds: at least, by the bytes that this program loads.
    """

    weights: int
    cache: int
    walked: int
    sent: float
    flops: float
    seconds: float
    compiled_seconds: float


def roofline(case: Deployment, compiled: Compiled, chip: Chip) -> Roofline:
    """The least time of a step similar to one that was compiled; what is sent grows with the rows."""
    layers = shapes.layer_sizes(case)
    model = shapes.device_bytes(shapes.read_every_step(case))
    weights = model + shapes.device_bytes(shapes.weights(case))
    cache = sum(layer.read for layer in layers)
    walked = sum(layer.walked for layer in layers) if compiled.program.kernels == "xla" else cache
    storage, dim = case.policy.storage, case.spec.head_dim
    key = storage.width(dim) * jnp.dtype(storage.dtype(jnp.dtype(case.dtype))).itemsize
    whole = shapes.device_bytes(shapes.read_every_step(dataclasses.replace(case, weight_dtype=None)))
    flops = 2.0 * case.device_rows * (whole / case.itemsize) + 2.0 * case.spec.groups * cache / key * dim
    sent = compiled.program.sent * case.rows / compiled.case.rows
    seconds, compiled_seconds = (
        max((weights + read) / chip.bandwidth, flops / chip.flops) + sent / chip.links
        for read in (cache, walked)
    )
    return Roofline(
        weights=weights,
        cache=cache,
        walked=walked,
        sent=sent,
        flops=flops,
        seconds=seconds,
        compiled_seconds=compiled_seconds,
    )


# --- meshes --------------------------------------------------------------------------------------


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


# --- the largest that fits -----------------------------------------------------------------------


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
    if case.share is not None:
        keeping = lambda n: dataclasses.replace(case, share=n / 100)  # noqa: E731
        most = math.floor(100 * case.share)
        if most and (share := largest(lambda n: fits(keeping(n), compiled, chip.memory), most)):
            ways.append(f"--share {share / 100:g}")
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
