"""vertical_slash by definition: blockwise attention at positions 0 .. T - 1 with admitted keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.blockwise import ref
from pallas_kernels.vertical_slash.compact import loudly

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@functools.partial(jax.jit, static_argnames=("window", "capacity", "scale", "softcap"))
def vertical_slash(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    admit: Bool[Array, "B K T"],
    lengths: Int[Array, " B"] | None,
    *,
    window: int,
    capacity: int,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    at = jnp.broadcast_to(jnp.arange(q.shape[2]), (q.shape[0], q.shape[2]))
    if lengths is not None:
        at = jnp.where(at < lengths[:, None], at, softmax.EMPTY)
    options = {"window": window, "scale": scale, "softcap": softcap}
    out, lse = ref.blockwise(q, k, v, at, at, admit, **options)
    count = jnp.sum(admit & (at >= 0)[:, None], axis=-1, dtype=jnp.int32)
    return loudly(out, lse, count, capacity)
