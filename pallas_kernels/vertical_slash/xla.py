"""vertical_slash in plain XLA: KV head after KV head, each as long as its own admitted keys.

A block of queries reads the keys of its band, latest first, and the packed keys older than its window.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.vertical_slash.compact import Inputs, admitted_upto, compact, lost, loudly, rows_of, seen
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCK_Q = 256
BLOCK_K = 256
EVEN = 16
"""Of which the keys of a band's block are a multiple."""

Stats = tuple["Array", "Array", "Array"]
"""(m, l, o), as in ``softmax``."""


@functools.partial(jax.jit, static_argnames="rule")
def vertical_slash(
    x: Inputs, *, rule: Rule
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    q, k, v, admit, *_ = x
    (b, n, t, h), heads, rows = q.shape, k.shape[1], rows_of(x)
    upto = admitted_upto(admit, rows.end)
    packed = compact(k, v, upto, rule.capacity)
    kv_heads = (
        q.reshape(b * heads, n // heads, t, h),
        *(x.reshape(b * heads, *x.shape[2:]) for x in (k, v, upto, *packed)),
        *(jnp.repeat(x, heads, axis=0) for x in rows),
    )
    out, lse = jax.lax.map(lambda x: _kv_head(*x, rule=rule), kv_heads)
    out, lse = loudly(out.reshape(b, n, t, h), lse.reshape(b, n, t), lost(upto, rule.capacity))
    return out, lse, upto[..., -1]


def _kv_head(
    q: Float[Array, "G T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S H"],
    upto: Int[Array, " S"],
    packed_k: Float[Array, "C H"],
    packed_v: Float[Array, "C H"],
    pos: Int[Array, " C"],
    offset: Int[Array, ""],
    length: Int[Array, ""],
    *,
    rule: Rule,
) -> tuple[Float[Array, "G T H"], Float[Array, "G T"]]:
    (g, t, h), window = q.shape, rule.window
    bq, bc = min(BLOCK_Q, t), min(BLOCK_K, len(pos))
    bk = min(_even(bq + max(window - 1, 0)), len(k))

    def grown(mlo: Stats, q_i: Array, k: Array, v: Array, see: Array) -> Stats:
        s = softmax.cap(products.scores(q_i, k, rule.scale), rule.softcap)
        s = softmax.hide(s, jnp.tile(see, (g, 1)))
        return softmax.grow(*mlo, s, lambda p: products.mix(p, v))

    def query_block(x: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i, start = x
        i = start + jnp.arange(bq)[:, None]
        end = jnp.minimum(start + bq, length)

        def band(c: Int[Array, ""], mlo: Stats) -> Stats:
            # Counted back from the end; the last of them may overlap the one before it, at the row's start.
            stop = end - c * bk
            first = jnp.maximum(stop - bk, 0)
            j = first + jnp.arange(bk)
            v_j = jnp.where((j < stop)[:, None], jax.lax.dynamic_slice_in_dim(v, first, bk), 0)
            see = (j < stop) & (j <= i) & (i - j < window) & (i < length)
            return grown(mlo, q_i, jax.lax.dynamic_slice_in_dim(k, first, bk), v_j, see)

        def vertical(c: Int[Array, ""], mlo: Stats) -> Stats:
            first = jnp.minimum(c * bc, len(pos) - bc)
            k_c, v_c, pos_c = (jax.lax.dynamic_slice_in_dim(x, first, bc) for x in (packed_k, packed_v, pos))
            fresh = first + jnp.arange(bc) >= c * bc
            return grown(mlo, q_i, k_c, v_c, fresh & (pos_c <= i - window) & (i < length))

        live = start < length
        row = (g * bq,)
        mlo = (
            jnp.full(row, -jnp.inf, jnp.float32),
            jnp.zeros(row, jnp.float32),
            jnp.zeros((*row, h), jnp.float32),
        )
        older = seen(upto[None, None], (end - 1 - window)[None, None], len(pos))[0, 0, 0]
        mlo = jax.lax.fori_loop(0, jnp.where(live, -(-older // bc), 0), vertical, mlo)
        # Without a window the band is empty, and may not meet values that no query sees: 0 times NaN is NaN.
        reach = end - jnp.maximum(start - window + 1, 0) if window else 0
        out, lse = softmax.finish(*jax.lax.fori_loop(0, jnp.where(live, -(-reach // bk), 0), band, mlo))
        return out.astype(rule.dtype), lse

    blocks = -(-t // bq)
    q = jnp.pad(q, ((0, 0), (0, blocks * bq - t), (0, 0)))
    q = q.reshape(g, blocks, bq, h).swapaxes(0, 1).reshape(blocks, g * bq, h)
    out, lse = jax.lax.map(query_block, (q, offset + jnp.arange(blocks) * bq))
    out = out.reshape(blocks, g, bq, h).swapaxes(0, 1).reshape(g, -1, h)
    return out[:, :t], lse.reshape(blocks, g, bq).swapaxes(0, 1).reshape(g, -1)[:, :t]


def _even(reach: int) -> int:
    """Keys of a block, up to ``BLOCK_K``, of which whole blocks are so many and next to none besides."""
    return -(-reach // (-(-reach // BLOCK_K) * EVEN)) * EVEN
