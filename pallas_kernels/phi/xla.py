"""phi in plain XLA: tokens in blocks, so that no [S, F] array of exponentials is held.

Exponentials and values meet in float32 whatever their dtype: a token is absorbed under one shift and
may be subtracted under another, and only float32 cancels then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.phi import ref

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

BLOCK = 1024
"""Tokens of a block. On two CPU cores larger ones leave the cache."""

evaluate = ref.evaluate
"""One product as small as the summary: the definition is as fast as it gets."""


def _blocks(x: Array, fill: bool | float) -> Array:
    """[B, K, S, ...] padded and split to [blocks, B, K, BLOCK, ...]."""
    b, heads, s = x.shape[:3]
    pad = [(0, 0)] * x.ndim
    pad[2] = (0, -s % BLOCK)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(b, heads, -1, BLOCK, *x.shape[3:]), 2, 0)


def sums(
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    there: Bool[Array, "B K S"],
    shift: Float[Array, "B K F"],
) -> tuple[Float[Array, "B K F"], Float[Array, "B K F H"]]:
    """The sums over tokens of exp(log_k - shift) and of the same times v; float32."""
    if log_k.shape[2] <= BLOCK:
        return ref.sums(log_k, v, there, shift)

    def add(
        total: tuple[Array, Array], block: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        weight, values = ref.sums(*block, shift)
        return (total[0] + weight, total[1] + values), None

    zero = jnp.zeros(shift.shape, jnp.float32), jnp.zeros((*shift.shape, v.shape[-1]), jnp.float32)
    (weight, values), _ = jax.lax.scan(add, zero, (_blocks(log_k, 0), _blocks(v, 0), _blocks(there, False)))
    return weight, values


build, subtract = ref.summing(sums)
