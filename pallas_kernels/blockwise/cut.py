"""Cutting arrays into blocks, and which blocks of queries and of keys meet; for the XLA forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.blockwise.sight import Where

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

BLOCK_Q = 256
BLOCK_K = 256
"""Scores of one KV head's block stay in the cache of a CPU core: 1.6 times as fast as all heads at once."""


def grouped(q: Float[Array, "B N T H"], k: Float[Array, "B K S H"]) -> Float[Array, "B K G T H"]:
    """The query heads of each KV head together."""
    b, n, t, h = q.shape
    return q.reshape(b, k.shape[1], n // k.shape[1], t, h)


def blocks(x: Array, axis: int, size: int, fill: int | float | bool) -> Array:
    """x with ``axis`` padded to a multiple of size and split into [blocks, ..., size, ...], blocks first."""
    count = -(-x.shape[axis] // size)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, pad, constant_values=fill) if pad[axis][1] else x
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def joined(x: Array, axis: int, length: int) -> Array:
    """The inverse of ``blocks``: [blocks, ..., size, ...] to ``length`` along ``axis``."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


class BlockPositions(NamedTuple):
    """Where blocks of queries and of keys lie: which of them meet."""

    q_pos: Int[Array, "I B T"]
    k_pos: Int[Array, "J B S"]
    admit: Bool[Array, "J B K S"] | None

    def any_visible(self, window: int | None) -> Bool[Array, "I J"]:
        """Whether any query of block i may see any key of block j; True errs on the safe side."""
        far = jnp.iinfo(jnp.int32).max // 2
        q_pos, k_pos = self.q_pos, self.k_pos
        q_lo = jnp.min(jnp.where(q_pos >= 0, q_pos, far), axis=-1)[:, None]
        q_hi = jnp.max(q_pos, axis=-1)[:, None]
        k_lo = jnp.min(jnp.where(k_pos >= 0, k_pos, far), axis=-1)[None, :]
        k_hi = jnp.max(k_pos, axis=-1)[None, :]
        see = (k_lo <= q_hi) & (k_hi >= 0) & (q_hi >= 0)
        if window is not None:
            near = q_lo - k_hi < window
            if self.admit is not None:
                near |= jnp.any(self.admit & (k_pos >= 0)[:, :, None, :], axis=(2, 3))[None, :]
            see &= near
        return jnp.any(see, axis=-1)

    def all_visible(self, window: int | None) -> Bool[Array, "I J"]:
        """Whether all queries of block i see all keys of block j, in all rows: nothing has to be hidden."""
        q_lo, q_hi = jnp.min(self.q_pos, axis=-1)[:, None], jnp.max(self.q_pos, axis=-1)[:, None]
        k_lo, k_hi = jnp.min(self.k_pos, axis=-1)[None, :], jnp.max(self.k_pos, axis=-1)[None, :]
        all_see = (k_lo >= 0) & (k_hi <= q_lo)
        if window is not None:
            all_see &= q_hi - k_lo < window
        return jnp.all(all_see, axis=-1)


class Blocks(NamedTuple):
    """Queries and keys in blocks, and where they lie."""

    q: Float[Array, "I B K G T H"]
    k: Float[Array, "J B K S H"]
    at: BlockPositions

    def where(self, i: Int[Array, ""], j: Int[Array, ""]) -> Where:
        """Block i of queries against block j of keys."""
        q_pos, admit = self.at.q_pos[i], self.at.admit
        let = None if admit is None else jax.lax.dynamic_index_in_dim(admit, j, keepdims=False)
        return Where(q_pos, self.at.k_pos[j], let)


def both(q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], where: Where) -> Blocks:
    """Queries and keys cut into blocks, what is left over padded."""
    bq, bk = min(BLOCK_Q, q.shape[3]), min(BLOCK_K, k.shape[2])
    q, k = blocks(q, 3, bq, 0), blocks(k, 2, bk, 0)
    positions = BlockPositions(
        blocks(where.q_pos, 1, bq, softmax.EMPTY),
        blocks(where.k_pos, 1, bk, softmax.EMPTY),
        None if where.admit is None else blocks(where.admit, 2, bk, False),
    )
    return Blocks(q, k, positions)


def listed(pairs: Bool[Array, "I J"]) -> tuple[Int[Array, "I J"], Int[Array, " I"]]:
    """For each i the j's that pair with it, first in the list, and how many they are."""
    return jnp.argsort(~pairs, axis=1, stable=True).astype(jnp.int32), jnp.sum(pairs, axis=1, dtype=jnp.int32)
