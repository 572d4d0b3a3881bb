"""What one device holds, loads and sends, from shapes and a compiled program."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment
from kvjax.plan._programs import Compiled
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


def resident(case: Deployment, *, reading: bool = False) -> Bytes:
    """What stays between two steps; ``reading``: while prompts are read."""
    layers = shapes.layer_sizes(case, reading=reading)
    return Bytes(
        weights=shapes.device_bytes(shapes.params(case)),
        learned=shapes.device_bytes(shapes.weights(case)),
        allocated=sum(layer.allocated for layer in layers),
        live=sum(layer.live for layer in layers),
    )


def bytes_like(case: Deployment, compiled: Compiled) -> Bytes:
    """What a device holds while a program runs that was compiled for a similar deployment.

    What lies between operations is assumed to grow with rows and context, padding with the state.
    """
    times = case.device_rows / compiled.case.device_rows * max(case.context / compiled.case.context, 1.0)
    between = (compiled.program.temporary + compiled.program.outputs) * times
    if compiled.reading:  # the input of a layer exists beside its output
        between += case.device_rows * case.read_at_once * case.spec.model_dim * case.itemsize
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
    flops = 2.0 * case.device_rows * (model / case.itemsize) + 2.0 * case.spec.groups * cache / key * dim
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
