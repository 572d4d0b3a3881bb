"""blockwise and column_mass by definition: every score at once, everything in float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def visible(
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    window: int | None,
    admit: Bool[Array, "B K S"] | None,
) -> Bool[Array, "... T S"]:
    """Which key each query of each KV head may see (rule 4 of the design; negative is padding)."""
    i, j = q_pos[:, None, None, :, None], k_pos[:, None, None, None, :]
    see = (i >= 0) & (j >= 0) & (j <= i)
    if window is None:
        return see
    near = i - j < window
    return see & (near if admit is None else near | admit[:, :, None, None, :])


def _scores(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    k_pos: Int[Array, "B S"],
    scale: float,
    softcap: float | None,
) -> Float[Array, "B K G T S"]:
    b, n, t, h = q.shape
    k = jnp.where((k_pos >= 0)[:, None, :, None], k.astype(jnp.float32), 0.0)
    q = q.astype(jnp.float32).reshape(b, k.shape[1], n // k.shape[1], t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, precision=jax.lax.Precision.HIGHEST) * scale
    return softmax.cap(s, softcap)


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def blockwise(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.blockwise``."""
    b, n, t, h = q.shape
    s = softmax.hide(_scores(q, k, k_pos, scale, softcap), visible(q_pos, k_pos, window, admit))
    m = softmax.row_max(s)
    p = softmax.weigh(s, m)
    v = jnp.where((k_pos >= 0)[:, None, :, None], v.astype(jnp.float32), 0.0)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v, precision=jax.lax.Precision.HIGHEST)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(b, n, t, h), lse.reshape(b, n, t)


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def column_mass(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    b, n, t, _ = q.shape
    s = softmax.hide(_scores(q, k, k_pos, scale, softcap), visible(q_pos, k_pos, window, admit))
    p = softmax.weigh(s, lse.reshape(s.shape[:-1]))
    mass = jnp.einsum("bkgts,bt->bkgs", p, weights, precision=jax.lax.Precision.HIGHEST)
    return mass.reshape(b, n, k.shape[2])
