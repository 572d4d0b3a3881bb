"""Cutting arrays into blocks, and which blocks of queries and of keys meet; for the XLA forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


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


def block_pairs(
    q_pos: Int[Array, "I B T"],
    k_pos: Int[Array, "J B S"],
    admit: Bool[Array, "J B K S"] | None,
    window: int | None,
) -> Bool[Array, "I J"]:
    """Whether any query of block i may see any key of block j; True errs on the safe side."""
    far = jnp.iinfo(jnp.int32).max // 2
    q_lo = jnp.min(jnp.where(q_pos >= 0, q_pos, far), axis=-1)[:, None]
    q_hi = jnp.max(q_pos, axis=-1)[:, None]
    k_lo = jnp.min(jnp.where(k_pos >= 0, k_pos, far), axis=-1)[None, :]
    k_hi = jnp.max(k_pos, axis=-1)[None, :]
    see = (k_lo <= q_hi) & (k_hi >= 0) & (q_hi >= 0)
    if window is not None:
        near = q_lo - k_hi < window
        if admit is not None:
            near |= jnp.any(admit & (k_pos >= 0)[:, :, None, :], axis=(2, 3))[None, :]
        see &= near
    return jnp.any(see, axis=-1)


def listed(pairs: Bool[Array, "I J"]) -> tuple[Int[Array, "I J"], Int[Array, " I"]]:
    """For each i the j's that pair with it, first in the list, and how many they are."""
    return jnp.argsort(~pairs, axis=1, stable=True).astype(jnp.int32), jnp.sum(pairs, axis=1, dtype=jnp.int32)


def at(x: Array | None, j: Int[Array, ""]) -> Array | None:
    """Block j of x, if there is an x."""
    return None if x is None else jax.lax.dynamic_index_in_dim(x, j, keepdims=False)
