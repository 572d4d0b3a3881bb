"""What one device holds and moves, from shapes and a compiled program; what a search asks many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from kvjax.plan import _shapes as shapes
from kvjax.plan._case import Case
from kvjax.plan._programs import Program
from kvjax.sharding.specs import DATA
from pallas_kernels.measure.chips import Chip


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
    """

    weights: int
    learned: int
    allocated: int
    live: int
    padding: int = 0
    temporary: int = 0
    code: int = 0

    @property
    def total(self) -> int:
        """All that has to fit."""
        return self.weights + self.learned + self.allocated + self.padding + self.temporary + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """A program that was compiled.

    Attributes:
      case: for what.
      program: what came out.
      padding: of a state, over its shapes.
      reading: it reads prompts.
    """

    case: Case
    program: Program
    padding: float = 0.0
    reading: bool = False


def resident(case: Case, *, reading: bool = False) -> Bytes:
    """What stays between two steps; ``reading``: while prompts are read."""
    held = shapes.held(case, reading=reading)
    return Bytes(
        weights=shapes.bytes_each(shapes.params(case)),
        learned=shapes.bytes_each(shapes.weights(case)),
        allocated=sum(layer.allocated for layer in held),
        live=sum(layer.live for layer in held),
    )


def bytes_like(case: Case, known: Known) -> Bytes:
    """What a device holds during a program that was compiled for a case like this one.

    What lies between operations is taken to grow with rows and context, and padding with the state.
    """
    each, before = (x.rows / x.mesh.size(DATA) for x in (case, known.case))
    times = each / before * max(case.context / known.case.context, 1.0)
    between = (known.program.temporary + known.program.outputs) * times
    if known.reading:  # what goes into a layer is there beside what comes out
        between += each * case.read_at_once * case.spec.model_dim * case.itemsize
    found = resident(case, reading=known.reading)
    return dataclasses.replace(
        found,
        padding=round(known.padding * found.allocated),
        temporary=round(between),
        code=known.program.code,
    )


# --- how long it takes at least ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """A decode step on one device, by what is published of it; nothing that waits is counted.

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


def roofline(case: Case, known: Known, chip: Chip) -> Roofline:
    """The least time of a step like one that was compiled; what is sent grows with the rows."""
    held = shapes.held(case)
    loaded = shapes.read_every_step(case)
    weights = shapes.bytes_each(loaded) + shapes.bytes_each(shapes.weights(case))
    cache = sum(layer.read for layer in held)
    walked = sum(layer.walked for layer in held) if known.program.kernels == "xla" else cache
    rows = case.rows // case.mesh.size(DATA)
    numbers = shapes.bytes_each(loaded) / case.itemsize
    storage, dim = case.policy.storage, case.spec.head_dim
    key = storage.width(dim) * jnp.dtype(storage.dtype(jnp.dtype(case.dtype))).itemsize
    flops = 2.0 * rows * numbers + 2.0 * case.spec.groups * cache / key * dim
    sent = known.program.sent * case.rows / known.case.rows
    loads = (weights + cache, weights + walked)
    times = [max(load / chip.bandwidth, flops / chip.flops) + sent / chip.links for load in loads]
    return Roofline(
        weights=weights,
        cache=cache,
        walked=walked,
        sent=sent,
        flops=flops,
        seconds=times[0],
        compiled_seconds=times[1],
    )


# --- searching -----------------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where smaller ones fit too; 0 where none does."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
