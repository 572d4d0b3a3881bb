"""blockwise and column_mass by definition: every score at once, everything in float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.blockwise.sight import Partial, Sight, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


EXACT = jax.lax.Precision.HIGHEST


def visible(where: Where, window: int | None) -> Bool[Array, "... T S"]:
    """Which key each query of each KV head may see; negative positions are padding."""
    i, j = where.q_pos[:, None, None, :, None], where.k_pos[:, None, None, None, :]
    see = (i >= 0) & (j >= 0) & (j <= i)
    if window is None:
        return see
    near = i - j < window
    return see & (near if where.admit is None else near | where.admit[:, :, None, None, :])


def _scores(q: Array, k: Array, where: Where, see: Array, sight: Sight) -> Float[Array, "B K G T S"]:
    """Scores of every query and key, whether the query sees it or not."""
    b, n, t, h = q.shape
    q = q.astype(jnp.float32).reshape(b, k.shape[1], n // k.shape[1], t, h)
    # In a gradient, too, 0 times NaN is NaN: what takes no part is 0.
    q = jnp.where(jnp.any(see, axis=-1, keepdims=True), q, 0.0)
    s = jnp.einsum("bkgth,bksh->bkgts", q, _reached(k, where), precision=EXACT) * sight.scale
    return softmax.cap(s, sight.softcap)


def _reached(x: Float[Array, "B K S H"], where: Where) -> Float[Array, "B K S H"]:
    return jnp.where((where.k_pos >= 0)[:, None, :, None], x.astype(jnp.float32), 0.0)


@functools.partial(jax.jit, static_argnames="sight")
def blockwise(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    """See ``api.blockwise``."""
    where = where.within_reach(sight.window)
    (b, n, t, h), see = q.shape, visible(where, sight.window)
    s = softmax.hide(_scores(q, k, where, see, sight), see)
    m = softmax.row_max(s)
    p = softmax.query_weights(s, m)
    o = jnp.einsum("bkgts,bksh->bkgth", p, _reached(v, where), precision=EXACT)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(b, n, t, h).astype(sight.dtype), lse.reshape(b, n, t)


@functools.partial(jax.jit, static_argnames="sight")
def column_mass(
    q: Array, k: Array, lse: Array, weights: Array, where: Where, *, sight: Sight
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    where = where.within_reach(sight.window)
    (b, n, _, _), see = q.shape, visible(where, sight.window)
    s = _scores(q, k, where, see, sight)
    p = softmax.probabilities(s, see, lse.reshape(s.shape[:-1]))
    return jnp.einsum("bkgts,bt->bkgs", p, weights, precision=EXACT).reshape(b, n, k.shape[2])
