"""Reads and writes at places that are known not to be negative: fewer operations to compile and to run.

``x[i]``, ``//`` and ``%`` do as NumPy does: a negative index counts from the end, a read out of range is
filled, a quotient is rounded down. That is up to forty operations each, and XLA copies them into every fusion
that uses the place. The cache needs none of it:

  ``x.at[i].get(**THERE)``    every place is in range
  ``x.at[i].set(y, **DROP)``  a place beyond the last writes nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int

THERE: dict[str, Any] = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}


def along(x: Array, index: Int[Array, ...], axis: int) -> Array:
    """``take_along_axis`` of places that are in range."""
    return jnp.take_along_axis(x, index, axis=axis, mode="promise_in_bounds")


def split(place: Int[Array, ...], size: int) -> tuple[Int[Array, ...], Int[Array, ...]]:
    """Which block of ``size`` slots a place is in, and which of its slots it is."""
    if size & (size - 1) == 0:
        return place >> (size.bit_length() - 1), place & (size - 1)
    divisor = jnp.full_like(place, size)
    return jax.lax.div(place, divisor), jax.lax.rem(place, divisor)


def blocks(count: Int[Array, ...], size: int) -> Int[Array, ...]:
    """Blocks of ``size`` slots that hold so many: the quotient rounded up."""
    return split(count + (size - 1), size)[0]
