"""The backward pass of the blocked XLA form: over key blocks, and the query blocks that meet each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.blockwise import cut
from pallas_kernels.blockwise.ref import visible

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

BLOCK_Q = 256
BLOCK_K = 512


def backward(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    lse: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
    up: Float[Array, "B N T H"],
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """(dq, dk, dv) in float32; k and v are finite everywhere. See ``grad.py``."""
    (b, _, t, _), (_, heads, s, _) = q.shape, k.shape
    bq, bk = min(BLOCK_Q, t), min(BLOCK_K, s)
    grouped = [cut.grouped(x, k) for x in (q.astype(k.dtype), up.astype(k.dtype))]
    stats = [x.reshape(b, heads, -1, t) for x in (lse, delta)]
    sides = [cut.blocks(x, 3, bq, 0) for x in (*grouped, *stats)]
    ks, vs = cut.blocks(k, 2, bk, 0), cut.blocks(v, 2, bk, 0)
    q_poss, k_poss = (cut.blocks(x, 1, size, softmax.EMPTY) for x, size in ((q_pos, bq), (k_pos, bk)))
    admits = None if admit is None else cut.blocks(admit, 2, bk, False)
    order, count = cut.listed(cut.block_pairs(q_poss, k_poss, admits, window).T)

    def key_block(dq: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        j, order_j, count_j = x

        def query_block(c: Int[Array, ""], grads: tuple[Array, ...]) -> tuple[Array, ...]:
            i = order_j[c]
            see = visible(q_poss[i], k_poss[j], window, cut.at(admits, j))
            q_i, up_i, lse_i, delta_i = (y[i] for y in sides)
            found = _tile(q_i, up_i, lse_i, delta_i, ks[j], vs[j], see, scale, softcap)
            return grads[0].at[i].add(found[0]), grads[1] + found[1], grads[2] + found[2]

        nothing = jnp.zeros(ks.shape[1:], jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(0, count_j, query_block, (dq, nothing, nothing))
        return dq, (dk, dv)

    start = jnp.zeros(sides[0].shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(key_block, start, (jnp.arange(ks.shape[0]), order, count))
    return cut.joined(dq, 3, t).reshape(q.shape), cut.joined(dk, 2, s), cut.joined(dv, 2, s)


def _tile(
    q: Float[Array, "B K G T H"],
    up: Float[Array, "B K G T H"],
    lse: Float[Array, "B K G T"],
    delta: Float[Array, "B K G T"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    see: Bool[Array, "... T S"],
    scale: float,
    softcap: float | None,
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """What one pair of blocks adds to (dq, dk, dv)."""
    b, heads, g, t, h = q.shape
    rows, up_rows = q.reshape(b, heads, g * t, h), up.reshape(b, heads, g * t, h)
    s = softmax.cap(products.scores(rows, k, scale), softcap)
    see = jnp.broadcast_to(see, (b, heads, g, t, k.shape[2])).reshape(s.shape)
    p = softmax.weigh(softmax.hide(s, see), lse.reshape(b, heads, -1))
    dp = products.scores(up_rows, v, 1.0)
    ds = p * (dp - delta.reshape(b, heads, -1, 1)) * scale
    ds = ds if softcap is None else ds * (1.0 - (s / softcap) ** 2)
    dk = products.mix(jnp.swapaxes(ds, -1, -2), rows)
    dv = products.mix(jnp.swapaxes(p, -1, -2), up_rows)
    return products.mix(ds, k).reshape(q.shape), dk, dv
