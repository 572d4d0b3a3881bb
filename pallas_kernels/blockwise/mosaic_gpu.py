"""blockwise on Hopper (H100, H200), in Pallas' Mosaic GPU: what is left when Pallas' Triton is gone.

The kernel is ``hopper_prefill``'s; its tiles are those that the walk of ``plan`` lists.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper_plan, hopper_prefill, tuning
from pallas_kernels.blockwise import plan
from pallas_kernels.hopper import ROWS
from pallas_kernels.hopper_plan import FAR, Keys, Place, Queries, Visit
from pallas_kernels.tuning import Blocks

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from pallas_kernels.blockwise.sight import Partial, Sight, Where
    from pallas_kernels.tuning import Tuned

BLOCKS = Blocks(k=128, stages=4)
"""Keys of a tile, and buffers of keys if so many fit."""


class Listed:
    """The course of ``plan.forward``'s walk: lists, counts of theirs, and which tiles have padding."""

    def counts(self, refs: list[Any], place: Place) -> tuple[Array, Array]:
        """See ``Course``."""
        _, counts, _ = refs
        mine = place.row, self._head(counts, place), place.block
        return counts[(*mine, 1)], counts[(*mine, 0)]

    def visit(self, refs: list[Any], place: Place, c: Array) -> Visit:
        """See ``Course``."""
        order, _, dirty = refs
        tile = order[place.row, self._head(order, place), place.block, c]
        return Visit(0, tile, dirty[place.row, tile])

    def lost(self, refs: list[Any], place: Place) -> None:
        """See ``Course``."""

    def _head(self, lists: Any, place: Place) -> Array | int:
        return place.head if lists.shape[1] > 1 else 0


def _arrays(walk: plan.Walk, dead: Int[Array, "B S"], block: int) -> list[Array]:
    """Of the course."""
    order, *counts = (x for x in walk if x is not None)
    dirty = jnp.any(dead.reshape(len(dead), -1, block), axis=-1)
    return [order, jnp.stack(counts, axis=-1), dirty.astype(jnp.int32)]


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def blockwise(
    q: Array, k: Array, v: Array, where: Where, *, sight: Sight, interpret: Any = False, blocks: Tuned = ()
) -> Partial:
    """See ``api.blockwise``."""
    hopper_plan.refuse("blockwise", k, interpret)
    (b, n, t, h), (_, heads, _, _) = q.shape, k.shape
    count, found = n // heads * t, tuning.pick(blocks, "forward", k.dtype, h, BLOCKS)
    sizes = hopper_plan.Plan(
        "blockwise", h, found.k, found.stages, 1 if count <= ROWS else 2,
        sight.scale, sight.softcap, sight.window is not None, sight.dtype, interpret or None,
    )  # fmt: skip
    sizes = sizes._replace(stages=hopper_plan.buffers(sizes))
    x = plan.rows(q, k, where, sight.window, sizes.queries, sizes.block, folded=True)
    dead = x.k_pos < 0
    at = jnp.where(dead, FAR, x.k_pos)
    near = None
    if x.admit is not None and sight.window is not None:
        near = jnp.where(x.admit > 0, FAR, at[:, None])
    sees = jnp.stack([x.q_pos, x.q_pos - (sight.window or 0)], axis=1)[:, None]
    arrays = _arrays(plan.forward(x, sight.window, sizes.queries, sizes.block), dead, sizes.block)
    keys = Keys(x.k, plan.padded(v, 2, sizes.block), at[:, None], near)
    out, lse = hopper_prefill.read(sizes, Listed(), Queries(x.q, sees), [keys], arrays)
    return out[:, :, :count].reshape(b, n, t, h), lse[:, :, :count].reshape(b, n, t)
