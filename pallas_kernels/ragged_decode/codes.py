"""Codes of quantised pools: int8 one to a byte, or 4 bits two to a byte (uint8).

Channel c and channel c + H / 2 share a byte, so that halves of a page are cut and not interleaved:

  byte c     bits 0-3  channel c           bits 4-7  channel c + H / 2      two's complement, -8 ... 7

A byte of zeros is two codes of zero, as in an int8 pool. A code in the high half of a byte, over zeros, is 16
times itself as an int8: ``halves`` shifts nothing back; the scale is divided by 16 instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

PAIRED = jnp.dtype(jnp.uint8)
"""The dtype of pools of 4 bits a code."""

TIMES = 16
"""What ``halves`` has multiplied codes by; exact in 16 bits."""


def paired(codes: Int[Array, "... H"]) -> Int[Array, "... H/2"]:
    """Codes of -8 … 7, two to a byte; H is even."""
    low, high = jnp.split(codes.astype(jnp.int8), 2, axis=-1)
    return jax.lax.bitcast_convert_type((low & 15) | (high << 4), PAIRED)


def channels(pool: Num[Array, "... X"]) -> int:
    """H of a pool, whatever lies in a byte."""
    return pool.shape[-1] * parts(pool)


def parts(pool: Num[Array, "... X"]) -> int:
    """Codes of a byte, each of another part of the channels; 1 of what is not packed."""
    return 2 if pool.dtype == PAIRED else 1


def halves(pool: Num[Array, "... X"]) -> tuple[Int[Array, "... X"], Int[Array, "... X"]]:
    """Codes of the low and of the high part of the channels, ``TIMES`` times, as int8."""
    bits = jax.lax.bitcast_convert_type(pool, jnp.int8)
    return bits << 4, bits & -TIMES


def floats(pool: Num[Array, "... X"]) -> Float[Array, "... H"]:
    """What part of a pool holds as float32, codes without their scales."""
    if pool.dtype != PAIRED:
        return pool.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(pool, jnp.int8)
    # Shifting a signed byte right repeats its sign.
    return jnp.concatenate([(bits << 4) >> 4, bits >> 4], axis=-1).astype(jnp.float32)
