"""decode_step by definition: write, gather all that is live, softmax, in float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.decode_step.call import Cache, Lists, Token

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def leaving_slot(
    cache: Cache, lists: Lists
) -> tuple[Int[Array, "B K"], Int[Array, "B K"], Bool[Array, "B K"]]:
    """(page, slot) that a leaving token goes to, beyond the pool where none does; and whether it does."""
    (pool, size, _), m = cache.k_pages.shape, lists.table.shape[2]
    entry = lists.length // size
    page = jnp.take_along_axis(lists.table, jnp.minimum(entry, m - 1)[..., None], axis=2)[..., 0]
    full = (lists.seen >= cache.ring_k.shape[2])[:, None]
    enters = lists.enters & full & (entry < m) & (page >= 0) & (page < pool)
    return jnp.where(enters, page, pool), lists.length % size, enters


def written(token: Token, cache: Cache, lists: Lists) -> tuple[Cache, Int[Array, "B K"]]:
    """The cache after the step, and live paged slots in it."""
    (rows, heads, window, _), pools = cache.ring_k.shape, cache[2:]
    row, head = jnp.arange(rows)[:, None], jnp.arange(heads)[None]
    slot = (jnp.maximum(lists.seen, 0) % window)[:, None]
    page, at, enters = leaving_slot(cache, lists)
    pages = (
        pool.at[page, at].set(ring[row, head, slot], mode="drop") for pool, ring in zip(pools, cache[:2])
    )
    slot = jnp.where(lists.seen[:, None] >= 0, slot, window)  # out of range: dropped by the scatter
    rings = (
        ring.at[row, head, slot].set(x.astype(ring.dtype), mode="drop")
        for ring, x in zip(cache[:2], token[1:])
    )
    return Cache(*rings, *pages), lists.length + enters


@functools.partial(jax.jit, static_argnames="scale")
def decode_step(token: Token, cache: Cache, lists: Lists, *, scale: float) -> tuple[Array, Array, Cache]:
    """See ``api.decode_step``."""
    (b, n, h), (pool, size, _), heads = token.q.shape, cache.k_pages.shape, cache.ring_k.shape[1]
    after, length = written(token, cache, lists)
    ids, m = jnp.clip(lists.table, 0, pool - 1), lists.table.shape[2]
    there = (lists.table >= 0) & (lists.table < pool)
    paged = there[..., None] & (jnp.arange(m * size).reshape(m, size) < length[..., None, None])
    ring = jnp.arange(after.ring_k.shape[2]) <= lists.seen[:, None]
    see = jnp.concatenate(
        [jnp.broadcast_to(ring[:, None], after.ring_k.shape[:3]), paged.reshape(b, heads, -1)], axis=-1
    )

    def all_of(ring: Array, pages: Array) -> Float[Array, "B K C H"]:
        whole = jnp.concatenate([ring, pages[ids].reshape(b, heads, -1, h)], axis=2).astype(jnp.float32)
        return jnp.where(see[..., None], whole, 0.0)

    k, v = all_of(after.ring_k, after.k_pages), all_of(after.ring_v, after.v_pages)
    q, exact = token.q.astype(jnp.float32).reshape(b, heads, -1, h), jax.lax.Precision.HIGHEST
    s = softmax.hide(jnp.einsum("bkgh,bkch->bkgc", q, k, precision=exact) * scale, see[:, :, None])
    top = softmax.row_max(s)
    p = softmax.query_weights(s, top)
    out, lse = softmax.finish(top, jnp.sum(p, axis=-1), jnp.einsum("bkgc,bkch->bkgh", p, v, precision=exact))
    return out.reshape(b, n, h).astype(token.q.dtype), lse.reshape(b, n), after
