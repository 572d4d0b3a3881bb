"""blockwise on Hopper (H100, H200), in Pallas' Mosaic GPU: what is left when Pallas' Triton is gone.

The kernel is ``hopper_prefill``'s; ``block_lists`` has the tiles that it reads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper_operands, hopper_prefill, tuning
from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise.sight import Partial, Sight, Where
from pallas_kernels.hopper import ROWS
from pallas_kernels.hopper_operands import FAR, Keys, KeyTile, Program, Queries
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.tuning import Blocks, Tuned

if TYPE_CHECKING:
    from jaxtyping import Array

BLOCKS = Blocks(k=128, stages=4)
"""Keys of a tile, and buffers of keys if so many fit."""


class Listed:
    """The order of ``block_lists.of_read``: lists, their counts, and which tiles have padding."""

    def counts(self, refs: list[Any], program: Program) -> tuple[Array, Array]:
        _, counts, _ = refs
        at = program.row, self._head(counts, program), program.block
        return counts[(*at, 1)], counts[(*at, 0)]

    def tile(self, refs: list[Any], program: Program, c: Array) -> KeyTile:
        order, _, dirty = refs
        tile = order[program.row, self._head(order, program), program.block, c]
        return KeyTile(0, tile, dirty[program.row, tile])

    def lost(self, refs: list[Any], program: Program) -> None:
        return None

    def _head(self, lists: Any, program: Program) -> Array | int:
        return program.head if lists.shape[1] > 1 else 0


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def blockwise(
    q: Array, k: Array, v: Array, where: Where, *, sight: Sight, interpret: Any = False, blocks: Tuned = ()
) -> Partial:
    """See ``api.blockwise``."""
    hopper_operands.refuse("blockwise", k, interpret)
    (b, n, t, h), (_, heads, _, _) = q.shape, k.shape
    count, chosen = n // heads * t, tuning.pick(blocks, "forward", k.dtype, h, BLOCKS)
    sizes = hopper_operands.PrefillSizes(
        "blockwise", h, chosen.k, chosen.stages, 1 if count <= ROWS else 2,
        sight.scale, sight.softcap, sight.window is not None, sight.dtype, interpret or None,
    )  # fmt: skip
    sizes = sizes._replace(stages=hopper_operands.buffers(sizes))
    x = block_lists.rows(q, k, where, sight.window, sizes.queries, sizes.block, folded=True)
    dead = x.k_pos < 0
    at = jnp.where(dead, FAR, x.k_pos)
    near = None
    if x.admit is not None and sight.window is not None:
        near = jnp.where(x.admit > 0, FAR, at[:, None])
    sees = jnp.stack([x.q_pos, x.q_pos - (sight.window or 0)], axis=1)[:, None]
    lists = block_lists.of_read(x, sight.window, sizes.queries, sizes.block)
    order, *counts = (y for y in lists if y is not None)
    dirty = jnp.any(dead.reshape(len(dead), -1, sizes.block), axis=-1)
    arrays = [order, jnp.stack(counts, axis=-1), dirty.astype(jnp.int32)]  # type: ignore[arg-type]
    keys = Keys(x.k, pad_to_multiple(v, 2, sizes.block), at[:, None], near)
    out, lse = hopper_prefill.read(sizes, Listed(), Queries(x.q, sees), [keys], arrays)
    return out[:, :, :count].reshape(b, n, t, h), lse[:, :, :count].reshape(b, n, t)
