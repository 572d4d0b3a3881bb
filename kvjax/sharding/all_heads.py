"""What a policy may ask about all KV heads of a layer, of which some may be on other devices.

A policy's part sees the heads of its device and knows of no other. Where a decision belongs to the layer and
not to a head (one ranking for all heads, slots that heads share), it asks through ``AllHeads``. On one device
the answer is its own value.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Num


@dataclasses.dataclass(frozen=True)
class AllHeads:
    """The heads of a layer, equally many on each of ``shards`` devices, in order.

    Each question is a collective that every device must join, so it may not stand in a branch or a loop that
    depends on what is held.

    Attributes:
      axis: the mesh axis along which they lie; None on one device.
      shards: devices along it.
    """

    axis: str | None = None
    shards: int = 1

    def count(self, local: int) -> int:
        """Heads of the layer, ``local`` of them on this device."""
        return local * self.shards

    def mean(self, x: Float[Array, "B N ..."]) -> Float[Array, "B 1 ..."]:
        """Over all heads; bit for bit the same on every device."""
        own = x.mean(axis=1, keepdims=True)
        return own if self.axis is None else jax.lax.pmean(own, self.axis)

    def largest(self, x: Float[Array, "B K ..."]) -> Float[Array, "B 1 ..."]:
        """Of all heads."""
        own = x.max(axis=1, keepdims=True)
        return own if self.axis is None else jax.lax.pmax(own, self.axis)

    def gather(self, x: Num[Array, "B K ..."]) -> Num[Array, "B K ..."]:
        """Every head's, in their order."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=1, tiled=True)

    def local(self, x: Num[Array, "B K ..."]) -> Num[Array, "B K ..."]:
        """Of values for all heads, those of this device's heads."""
        if self.axis is None:
            return x
        heads = x.shape[1] // self.shards
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axis) * heads, heads, axis=1)


HERE = AllHeads()
"""All heads are on this device."""
