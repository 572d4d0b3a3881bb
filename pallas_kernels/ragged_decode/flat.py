"""The flat form of ragged_decode: walk the pool as it lies and bring the queries to the pages.

Gathering a stream's pages costs several times reading them (5 ms against 0.9 ms for 8192 slots of
5 heads, page 64, two CPU cores). So no key or value moves: every page gets its owner's queries,
answers with a partial of its own, and the partials of a stream's pages are summed at the end.

  pool       page 0   page 1   page 2   page 3 ...   chunks of CHUNK pages, dead chunks skipped
  owner      (0, 1)   (1, 0)   nobody   (0, 1)       from the table, one small scatter
  partial    m l o    m l o    -        m l o        segment max and sum by owner

A chunk stays in cache between its two products, which is also where int8 becomes float: as a whole
the pool is never converted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Num

CHUNK = 64


class Owners(NamedTuple):
    """Whose each pool page is: stream b * K + k (B * K for nobody's), and its live slots."""

    stream: Int[Array, " P"]
    live: Int[Array, " P"]


def owners(ids: Int[Array, "B K M"], live: Int[Array, "B K M"], pool: int) -> Owners:
    """Turn the lists of pages around: for each page its stream and live slots."""
    streams = ids.shape[0] * ids.shape[1]
    to = jnp.where(live > 0, ids, pool).reshape(-1)
    stream = jnp.repeat(jnp.arange(streams, dtype=jnp.int32), ids.shape[2])
    return Owners(
        jnp.full(pool, streams, jnp.int32).at[to].set(stream, mode="drop"),
        jnp.zeros(pool, jnp.int32).at[to].set(live.reshape(-1).astype(jnp.int32), mode="drop"),
    )


def _page_partials(
    q: Float[Array, "P R H"],
    k: Num[Array, "P S H"],
    v: Num[Array, "P S H"],
    live: Int[Array, " P"],
    scales: Float[Array, "P 2 H"] | None,
    scale: float,
) -> tuple[Float[Array, "P R"], Float[Array, "P R"], Float[Array, "P R H"], Float[Array, "P R S"]]:
    """(m, l, o) of each page alone, and its exp(scores - m)."""
    see = jnp.arange(k.shape[1]) < live[:, None]
    v = jnp.where(see[..., None], v, jnp.zeros((), v.dtype))
    if scales is not None:
        q, k, v = q * scales[:, None, 0], k.astype(jnp.float32), v.astype(jnp.float32)
    s = products.scores(q, k, scale)
    m = softmax.row_max(s, see[:, None])
    p = softmax.weigh(s, see[:, None], m)
    o = products.mix(p, v)
    return m, jnp.sum(p, axis=-1), o if scales is None else o * scales[:, None, 1], p


def partials(
    q: Float[Array, "X R H"],
    k_pages: Num[Array, "P S H"],
    v_pages: Num[Array, "P S H"],
    own: Owners,
    scales: Float[Array, "P 2 H"] | None,
    scale: float,
    mass: bool,
) -> tuple[Float[Array, "P R"], Float[Array, "P R"], Float[Array, "P R H"], Float[Array, "P R S"] | None]:
    """Every owned page's partial, chunk by chunk; pages of dead chunks keep the empty partial."""
    (pool, size, h), rows = k_pages.shape, q.shape[1]
    chunk = min(CHUNK, pool)
    # The last chunk starts early enough to fit, and repeats pages the one before it has done.
    starts = jnp.minimum(jnp.arange(-(-pool // chunk)) * chunk, pool - chunk)
    busy = jnp.any(own.live[starts[:, None] + jnp.arange(chunk)] > 0, axis=1)
    starts = starts[jnp.argsort(~busy, stable=True)]

    def one(i: Int[Array, ""], found: tuple[Array, ...]) -> tuple[Array, ...]:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, starts[i], chunk)

        mine = q[jnp.minimum(cut(own.stream), q.shape[0] - 1)]
        part_scales = None if scales is None else cut(scales)
        new = _page_partials(mine, cut(k_pages), cut(v_pages), cut(own.live), part_scales, scale)
        return tuple(jax.lax.dynamic_update_slice_in_dim(x, y, starts[i], 0) for x, y in zip(found, new))

    start = (
        jnp.full((pool, rows), -jnp.inf, jnp.float32),
        jnp.zeros((pool, rows), jnp.float32),
        jnp.zeros((pool, rows, h), jnp.float32),
    )
    if mass:
        m, l, o, p = jax.lax.fori_loop(
            0, jnp.sum(busy), one, (*start, jnp.zeros((pool, rows, size), jnp.float32))
        )
        return m, l, o, p
    m, l, o = jax.lax.fori_loop(0, jnp.sum(busy), one, start)
    return m, l, o, None


def combine(
    m: Float[Array, "P R"], l: Float[Array, "P R"], o: Float[Array, "P R H"], own: Owners, streams: int
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Partials of pages to partials of streams. (Measured faster than gathering by table.)"""
    top = jax.ops.segment_max(m, own.stream, streams)
    w = jnp.exp(m - softmax.finite(top)[jnp.minimum(own.stream, streams - 1)])
    l = jax.ops.segment_sum(w * l, own.stream, streams)
    o = jax.ops.segment_sum(w[..., None] * o, own.stream, streams)
    return softmax.finish(top, l, o)
