"""gated by definition: every score at once, everything in float32, differentiated by jax."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.gated.vjp import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def seen(
    i: Int[Array, " T"], j: Int[Array, " S"], lengths: Int[Array, " B"] | None
) -> Bool[Array, "... T S"]:
    """Which key position j each query position i may see: none of the future, none past the row's end."""
    past = j[None, :] <= i[:, None]
    return past if lengths is None else past & (i[:, None] < lengths[:, None, None, None, None])


@functools.partial(jax.jit, static_argnames="rule")
def gated(
    q: Array, k: Array, v: Array, log_gate: Array, lengths: Array | None, *, rule: Rule
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.gated``."""
    (b, n, t, h), heads, at = q.shape, k.shape[1], jnp.arange(q.shape[2])
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if lengths is not None:
        there = (at < lengths[:, None])[:, None, :, None]
        q, k, v = (jnp.where(there, x, 0.0) for x in (q, k, v))
    grouped = q.reshape(b, heads, n // heads, t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", grouped, k, precision=jax.lax.Precision.HIGHEST) * rule.scale
    near = at[:, None] - at[None, :] < rule.window
    s = softmax.cap(s, rule.softcap) + jnp.where(near, 0.0, log_gate.astype(jnp.float32)[:, :, None, None, :])
    s = softmax.hide(s, seen(at, at, lengths))
    m = softmax.row_max(s)
    p = softmax.query_weights(s, m)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v, precision=jax.lax.Precision.HIGHEST)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(b, n, t, h), lse.reshape(b, n, t)
