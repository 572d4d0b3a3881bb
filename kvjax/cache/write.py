"""Writing entries into rings and pools in place.

Why: kvjax/DESIGN.md, 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array


def scattered(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    """``old`` with ``value`` at ``index``, cast to its dtype; indices out of range write nothing."""
    value = value.astype(old.dtype)
    # XLA before jax 0.12 turns all of a bfloat16 array into float32 and back around a scatter on CPU, which
    # costs several reads of the whole cache a step. Its bits as integers are left alone.
    if old.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12):
        return jax.lax.platform_dependent(old, index, value, cpu=_as_bits, default=_plainly)
    return _plainly(old, index, value)


def _plainly(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    return old.at[index].set(value, mode="drop")


def _as_bits(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    old, value = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (old, value))
    return jax.lax.bitcast_convert_type(_plainly(old, index, value), jnp.bfloat16)
