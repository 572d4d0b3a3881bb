"""Codes of quantised pools: int8 one to a byte, 4 bits two to a byte (uint8), e4m3 two to a word (uint16).

Channel c and channel c + H / 2 share a byte, so that halves of a page are cut and not interleaved:

  byte c     bits 0-3  channel c           bits 4-7  channel c + H / 2      two's complement, -8 ... 7

``Grouped`` codes have no sign: they count steps from a lowest value. Of 2 bits four lie in a byte, those of
channels c, c + H / 4, c + H / 2 and c + 3 H / 4.

A byte of zeros is two codes of zero, as in an int8 pool. A code in the high half of a byte, over zeros, is 16
times itself as an int8: ``halves`` shifts nothing back; the scale is divided by 16 instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

PAIRED = jnp.dtype(jnp.uint8)
"""The dtype of pools of 4 bits a code."""

FLOATS8 = jnp.dtype(jnp.uint16)
"""The dtype of pools of 8-bit floats. A pool of their own dtype would become float16 and back around
each scatter on a CPU."""

TIMES = 16
"""What ``halves`` has multiplied codes by; exact in 16 bits."""


class Grouped(NamedTuple):
    """Lowest value and step of groups of codes, float16; a pool of them is uint8.

    Attributes:
      k: of the slots of a group, by channel; a page has g groups.
      v: of each slot, for J groups of channels.
    """

    k: Any  # [P, g, 2, H]
    v: Any  # [P, S, 2, J]


def packed(codes: Int[Array, "... H"], bits: int) -> Int[Array, "... X"]:
    """Codes without sign, 8 / ``bits`` to a byte."""
    parts = jnp.split(codes.astype(PAIRED), 8 // bits, axis=-1)
    return functools.reduce(jnp.bitwise_or, (part << (bits * at) for at, part in enumerate(parts)))


def unpacked(pool: Int[Array, "... X"], bits: int) -> Int[Array, "... H"]:
    """What ``packed`` packed."""
    return jnp.concatenate([(pool >> (bits * at)) & (2**bits - 1) for at in range(8 // bits)], axis=-1)


def lowest_and_step(grid: Float[Array, "... 2 Z"], axis: int | None = None) -> tuple[Array, Array]:
    """Both in float32; with ``axis``, the axis of the codes that share them."""
    pair = (grid[..., i, :].astype(jnp.float32) for i in (0, 1))
    lowest, step = pair if axis is None else (jnp.expand_dims(x, axis) for x in pair)
    return lowest, step


def decoded(
    codes: Int[Array, ...], grid: Float[Array, "... 2 Z"], axis: int | None = None
) -> Float[Array, ...]:
    """Values of codes that count steps from a lowest value."""
    lowest, step = lowest_and_step(grid, axis)
    return lowest + step * codes


def values(pool: Num[Array, "... S X"], scales: Any, which: int) -> Float[Array, "... S H"]:
    """What pages of codes stand for, keys (0) or values (1); leading axes of scales as of the pool."""
    if not isinstance(scales, Grouped):
        return floats(pool) * scales[..., which, None, :]
    (*lead, size, width), h = pool.shape, scales.k.shape[-1]
    codes, grid = unpacked(pool, 8 * width // h), scales[which]
    if which == 0:
        codes = codes.reshape(*lead, grid.shape[-3], -1, h)
    else:
        codes = codes.reshape(*lead, size, grid.shape[-1], -1)
    return decoded(codes, grid, -2 if which == 0 else -1).reshape(*lead, size, h)


def paired(codes: Int[Array, "... H"]) -> Int[Array, "... H/2"]:
    """Codes of -8 … 7, two to a byte; H is even."""
    low, high = jnp.split(codes.astype(jnp.int8), 2, axis=-1)
    return jax.lax.bitcast_convert_type((low & 15) | (high << 4), PAIRED)


def floats8(x: Float[Array, "... H"]) -> Int[Array, "... H/2"]:
    """The nearest e4m3 floats, two to a word; H is even, and no |x| is above 448."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    low, high = jnp.split(bits.astype(FLOATS8), 2, axis=-1)
    return low | (high << 8)


def channels(pool: Num[Array, "... X"], scales: Any = None) -> int:
    """H of a pool, whatever lies in a byte."""
    return scales.k.shape[-1] if isinstance(scales, Grouped) else pool.shape[-1] * parts(pool)


def parts(pool: Num[Array, "... X"]) -> int:
    """Codes of an element, each of another part of the channels; 1 of what is not packed."""
    return 2 if pool.dtype in (PAIRED, FLOATS8) else 1


def halves(pool: Num[Array, "... X"]) -> tuple[Int[Array, "... X"], Int[Array, "... X"]]:
    """Codes of the low and of the high part of the channels, ``TIMES`` times, as int8."""
    bits = jax.lax.bitcast_convert_type(pool, jnp.int8)
    return bits << 4, bits & -TIMES


def floats(pool: Num[Array, "... X"]) -> Float[Array, "... H"]:
    """What part of a pool holds as float32, codes without their scales."""
    if pool.dtype == FLOATS8:
        both = jnp.concatenate([pool & 255, pool >> 8], axis=-1).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(both, jnp.float8_e4m3fn).astype(jnp.float32)
    if pool.dtype != PAIRED:
        return pool.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(pool, jnp.int8)
    # Shifting a signed byte right repeats its sign.
    return jnp.concatenate([(bits << 4) >> 4, bits >> 4], axis=-1).astype(jnp.float32)


@functools.cache
def hadamard(h: int) -> np.ndarray:
    """A symmetric orthogonal matrix [H, H], its own inverse, with entries of one size.

    Sylvester's matrix where H is a power of two; else several of them, of the largest power of two that
    divides H, along the diagonal.
    """
    size = h & -h
    matrix: np.ndarray = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return np.kron(np.eye(h // size), matrix / size**0.5).astype(np.float32)


def turned(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """x times ``hadamard``, in float32 and back in its dtype; twice gives x.

    Products of turned vectors are those of the vectors. A channel that stands out is spread over all, so that
    codes of few bits lose less (https://arxiv.org/abs/2404.00456).
    """
    wide = jnp.einsum(
        "...h,hc->...c", x.astype(jnp.float32), hadamard(x.shape[-1]), precision=jax.lax.Precision.HIGHEST
    )
    return wide.astype(x.dtype)
