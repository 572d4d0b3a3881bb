"""blockwise and column_mass by definition: every score at once, everything in float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from pallas_kernels.blockwise.sight import Partial, Sight, Where


def visible(where: Where, window: int | None) -> Bool[Array, "... T S"]:
    """Which key each query of each KV head may see (rule 4 of the design; negative is padding)."""
    i, j = where.q_pos[:, None, None, :, None], where.k_pos[:, None, None, None, :]
    see = (i >= 0) & (j >= 0) & (j <= i)
    if window is None:
        return see
    near = i - j < window
    return see & (near if where.admit is None else near | where.admit[:, :, None, None, :])


def _scores(q: Array, k: Array, where: Where, sight: Sight) -> Float[Array, "B K G T S"]:
    """Scores of every query and key; -inf where hidden."""
    b, n, t, h = q.shape
    k = jnp.where((where.k_pos >= 0)[:, None, :, None], k.astype(jnp.float32), 0.0)
    q = q.astype(jnp.float32).reshape(b, k.shape[1], n // k.shape[1], t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, precision=jax.lax.Precision.HIGHEST) * sight.scale
    return softmax.hide(softmax.cap(s, sight.softcap), visible(where, sight.window))


@functools.partial(jax.jit, static_argnames="sight")
def blockwise(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    """See ``api.blockwise``."""
    b, n, t, h = q.shape
    s = _scores(q, k, where, sight)
    m = softmax.row_max(s)
    p = softmax.weigh(s, m)
    v = jnp.where((where.k_pos >= 0)[:, None, :, None], v.astype(jnp.float32), 0.0)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v, precision=jax.lax.Precision.HIGHEST)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(b, n, t, h), lse.reshape(b, n, t)


@functools.partial(jax.jit, static_argnames="sight")
def column_mass(
    q: Array, k: Array, lse: Array, weights: Array, where: Where, *, sight: Sight
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    b, n, t, _ = q.shape
    s = _scores(q, k, where, sight)
    p = softmax.weigh(s, lse.reshape(s.shape[:-1]))
    mass = jnp.einsum("bkgts,bt->bkgs", p, weights, precision=jax.lax.Precision.HIGHEST)
    return mass.reshape(b, n, k.shape[2])
