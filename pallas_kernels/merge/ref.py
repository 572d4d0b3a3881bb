"""merge by its definition: softmax over the parts' lse, applied to their outputs."""

from __future__ import annotations

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
    """See ``api.merge``."""
    outs = jnp.stack([out.astype(jnp.float32) for out, _ in parts], axis=-2)
    lses = jnp.stack([lse.astype(jnp.float32) for _, lse in parts], axis=-1)
    there = lses != -jnp.inf
    m = softmax.row_max(lses)
    w = softmax.query_weights(lses, m)
    o = jnp.sum(w[..., None] * jnp.where(there[..., None], outs, 0.0), axis=-2)
    return softmax.finish(m, jnp.sum(w, axis=-1), o)
