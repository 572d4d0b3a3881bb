"""The step as it is now: XLA turns and writes, a kernel reads the ring, one the pages, one φ, XLA merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.merge.api import merge
from pallas_kernels.phi.api import phi_build, phi_evaluate
from pallas_kernels.ragged_decode.api import ragged_decode
from studies.one_kernel.arrays import Cache, Token, turned

if TYPE_CHECKING:
    from jaxtyping import Array


def step(cache: Cache, token: Token, impl: str | None = None) -> tuple[Array, Array, Cache]:
    """(out [B, N, H], lse [B, N], the cache after the step)."""
    (rows, heads, window, _), (pool, size, _) = cache.ring_k.shape, cache.k_pages.shape
    cos, sin = token.cos[:, None], token.sin[:, None]
    q, k = (turned(x, cos, sin).astype(x.dtype) for x in (token.q, token.k))
    b, h, at = jnp.arange(rows)[:, None], jnp.arange(heads)[None], (token.seen % window)[:, None]
    old_k, old_v = cache.ring_k[b, h, at], cache.ring_v[b, h, at]
    at = jnp.where(token.seen[:, None] >= 0, at, window)  # out of range: dropped by the scatter
    page = jnp.take_along_axis(token.table, (token.length // size)[..., None], axis=2)[..., 0]
    page = jnp.where(token.admit, page, pool)
    slot = token.length % size
    k_pages = cache.k_pages.at[page, slot].set(old_k, mode="drop")
    v_pages = cache.v_pages.at[page, slot].set(old_v, mode="drop")
    ring_k = cache.ring_k.at[b, h, at].set(k, mode="drop")
    ring_v = cache.ring_v.at[b, h, at].set(token.v, mode="drop")
    q, held = q[:, :, None], token.seen[:, None] - (token.seen[:, None] - jnp.arange(window)) % window
    parts = [
        blockwise(q, ring_k, ring_v, q_pos=token.seen[:, None], k_pos=held, impl=impl),
        ragged_decode(q, k_pages, v_pages, token.table, token.length + token.admit, impl=impl),
    ]
    summary = cache.summary
    if summary is not None:
        summary = phi_build(
            token.log_k[:, :, None],
            old_v[:, :, None].astype(jnp.float32),
            there=token.absorb[:, :, None],
            onto=summary,
            impl=impl,
        )
        parts.append(phi_evaluate(summary, token.log_q[:, :, None], impl=impl))
    out, lse = merge(parts)
    return (
        out[:, :, 0].astype(token.q.dtype),
        lse[:, :, 0],
        Cache(ring_k, ring_v, k_pages, v_pages, summary),
    )
