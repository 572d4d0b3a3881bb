"""merge as one chain of elementwise operations, so that XLA fuses it into a single loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.jit
def merge(
    parts: Sequence[tuple[Float[Array, "... H"], Float[Array, " ..."]]],
) -> tuple[Float[Array, "... H"], Float[Array, " ..."]]:
    """See ``api.merge``. No stacking: the parts are read where they are."""
    m = functools.reduce(jnp.maximum, [jax.lax.stop_gradient(lse).astype(jnp.float32) for _, lse in parts])
    l, o = jnp.float32(0), jnp.float32(0)
    for out, lse in parts:
        there = lse != -jnp.inf
        w = jnp.exp(lse.astype(jnp.float32) - softmax.finite(m))
        l = l + w
        o = o + w[..., None] * jnp.where(there[..., None], out.astype(jnp.float32), 0.0)
    return softmax.finish(m, l, o)
