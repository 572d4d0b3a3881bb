"""The backward pass of the blocked XLA form: over key blocks, and the query blocks that meet each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.blockwise import cut
from pallas_kernels.blockwise.ref import visible
from pallas_kernels.blockwise.sight import Above, Sight, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def backward(
    q: Array, k: Array, v: Array, where: Where, above: Above, *, sight: Sight
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """(dq, dk, dv) in float32; q, k and v are 0 where they take no part. See ``grad.py``."""
    (b, _, t, _), (_, heads, s, _) = q.shape, k.shape
    x = cut.both(cut.grouped(q.astype(k.dtype), k), k, where)
    bq, bk = x.q.shape[4], x.k.shape[3]
    up = cut.grouped(above.up.astype(k.dtype), k)
    stats = [y.reshape(b, heads, -1, t) for y in above[1:]]
    sides = [x.q, *(cut.blocks(y, 3, bq, 0) for y in (up, *stats))]
    vs = cut.blocks(v, 2, bk, 0)
    order, count = cut.listed(x.at.any_visible(sight.window).T)

    def key_block(dq: Array, y: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        j, order_j, count_j = y

        def query_block(c: Int[Array, ""], grads: tuple[Array, ...]) -> tuple[Array, ...]:
            i = order_j[c]
            see = visible(x.where(i, j), sight.window)
            added = _tile(Side(*(z[i] for z in sides)), x.k[j], vs[j], see, sight)
            return grads[0].at[i].add(added[0]), grads[1] + added[1], grads[2] + added[2]

        nothing = jnp.zeros(x.k.shape[1:], jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(0, count_j, query_block, (dq, nothing, nothing))
        return dq, (dk, dv)

    start = jnp.zeros(x.q.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(key_block, start, (jnp.arange(x.k.shape[0]), order, count))
    return cut.joined(dq, 3, t).reshape(q.shape), cut.joined(dk, 2, s), cut.joined(dv, 2, s)


class Side(NamedTuple):
    """What is known of a block of queries."""

    q: Float[Array, "B K G T H"]
    up: Float[Array, "B K G T H"]
    lse: Float[Array, "B K G T"]
    delta: Float[Array, "B K G T"]


def _tile(
    side: Side,
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    see: Bool[Array, "... T S"],
    sight: Sight,
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """What one pair of blocks adds to (dq, dk, dv)."""
    q, scale, softcap = side.q, sight.scale, sight.softcap
    b, heads, g, t, h = q.shape
    rows, up_rows = q.reshape(b, heads, g * t, h), side.up.reshape(b, heads, g * t, h)
    s = softmax.cap(products.scores(rows, k, scale), softcap)
    see = jnp.broadcast_to(see, (b, heads, g, t, k.shape[2])).reshape(s.shape)
    p = softmax.probabilities(s, see, side.lse.reshape(b, heads, -1))
    dp = products.scores(up_rows, v, 1.0)
    bend = scale if softcap is None else scale * (1.0 - (s / softcap) ** 2)
    ds = jnp.where(p != 0, p * (dp - side.delta.reshape(b, heads, -1, 1)) * bend, 0.0)
    dk = products.mix(jnp.swapaxes(ds, -1, -2), rows)
    dv = products.mix(jnp.swapaxes(p, -1, -2), up_rows)
    return products.mix(ds, k).reshape(q.shape), dk, dv
