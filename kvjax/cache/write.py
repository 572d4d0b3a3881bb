"""Writing entries into rings and pools in place."""

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
    if old.dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        bits = jax.lax.bitcast_convert_type(old, jnp.uint16)
        bits = bits.at[index].set(jax.lax.bitcast_convert_type(value, jnp.uint16), mode="drop")
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return old.at[index].set(value, mode="drop")
