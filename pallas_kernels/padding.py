"""Operands in whole tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array


def round_up(x: int, size: int) -> int:
    """x rounded up to a multiple of ``size``."""
    return -(-x // size) * size


def pad_to_multiple(x: Array, axis: int, size: int, fill: int | float = 0) -> Array:
    """x with ``axis`` padded to a multiple of ``size``."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, pad, constant_values=fill) if pad[axis][1] else x


def pad_to(x: Array, t: int, h: int | None = None, fill: int | float = 0) -> Array:
    """x [B, N, T, ...] padded to ``t`` positions and, if it has channels, to ``h`` of them."""
    wide = [(0, 0)] * (x.ndim - 3)
    if h is not None and x.ndim == 4:
        wide = [(0, h - x.shape[3])]
    return jnp.pad(x, [(0, 0), (0, 0), (0, t - x.shape[2]), *wide], constant_values=fill)
