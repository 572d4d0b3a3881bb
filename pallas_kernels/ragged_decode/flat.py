"""The flat form of ragged_decode: read the pool in place and bring the queries to the pages.

Gathering a KV head's pages costs several times reading them (5 ms against 0.9 ms for 8192 slots of
5 heads, page 64, two CPU cores). So no key or value moves: every page gets its owner's queries,
answers with a partial of its own, and the partials of a KV head's pages are summed at the end.

  pool       page 0   page 1   page 2   page 3 ...
  owner      (0, 1)   (1, 0)   none     (0, 1)       from the table, one small scatter
  partial    m l o    m l o    -        m l o        segment max and sum by owner

A float pool is one product in place: cutting it into chunks copies it (all pages owned: a tenth slower in
float32, a third in bfloat16; a gain of a tenth with 90 of 160 owned). A large one of which less than half of
the chunks has an owner is read by chunks, too: one text in a batch of sixteen rows, as free pages are given
out from the lowest on.
A pool of codes is read in chunks of pages, which become float while they are in a core's own cache, and
chunks that no KV head owns are skipped: the pool is never converted as a whole.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.ragged_decode import codes
from pallas_kernels.ragged_decode.call import Options, Pools

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num

CHUNK = 4096
"""Slots of a chunk: 1 MB of float keys of 64 channels. (INT8, 32,768 slots, one CPU thread: 1.8 ms, with
16,384 2.4, with 2,048 2.0.)"""


LARGE = 4
"""Chunks from which on a float pool may be read without those that nobody owns."""


class Owners(NamedTuple):
    """The owner of each pool page, KV head b * K + k (B * K: no owner), and its live slots."""

    kv_head: Int[Array, " P"]
    live: Int[Array, " P"]


def owners(
    ids: Int[Array, "B K M"], live: Int[Array, "B K M"], pool: int
) -> tuple[Owners, Bool[Array, " X"]]:
    """Turn the lists of pages around: for each page its KV head and live slots.

    A page that is listed twice has one owner; the second result says which KV heads lost a page.
    """
    kv_heads, m = ids.shape[0] * ids.shape[1], ids.shape[2]
    ids, live = ids.reshape(kv_heads, m), live.reshape(kv_heads, m).astype(jnp.int32)
    entry = jnp.arange(kv_heads * m, dtype=jnp.int32).reshape(kv_heads, m)
    nobody = jnp.full(pool, kv_heads * m, jnp.int32)
    at = jnp.where(live > 0, ids, pool).reshape(-1)
    of = nobody.at[at].set(entry.reshape(-1), mode="drop", wrap_negative_indices=False)
    last = of.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    lost = jnp.any((live > 0) & (last != entry), axis=1)
    return Owners(
        jax.lax.div(of, jnp.full_like(of, m)), jnp.take(live.reshape(-1), of, mode="fill", fill_value=0)
    ), lost


class Chunks(NamedTuple):
    """Where the chunks of a pool begin, those with live slots first, and how many these are."""

    starts: Int[Array, " C"]
    busy: Int[Array, ""]
    pages: int

    def cut(self, x: Num[Array, "P ..."], i: Int[Array, ""]) -> Num[Array, "p ..."]:
        """Chunk i of what has a row a page."""
        return jax.lax.dynamic_slice_in_dim(x, self.starts[i], self.pages)

    def put(self, x: Array, part: Array, i: Int[Array, ""]) -> Array:
        """x with chunk i replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.starts[i], 0)


def chunks_of(own: Owners, size: int) -> Chunks:
    """The chunks of a pool of pages of ``size`` slots."""
    pool = own.live.shape[0]
    pages = min(max(1, CHUNK // size), pool)
    # The last chunk starts early enough to fit, and repeats pages the one before it has done.
    starts = jnp.minimum(jnp.arange(-(-pool // pages)) * pages, pool - pages)
    busy = jnp.any(own.live[starts[:, None] + jnp.arange(pages)[None, :]] > 0, axis=1)
    return Chunks(starts[jnp.argsort(~busy, stable=True)], jnp.sum(busy), pages)


class Partials(NamedTuple):
    """(m, l, o) of each page alone, and where somebody asks for it its p = exp(scores - m)."""

    m: Float[Array, "P R"]
    l: Float[Array, "P R"]
    o: Float[Array, "P R H"]
    p: Float[Array, "P R S"] | None


def _live_slots(own: Owners, size: int) -> Bool[Array, "P S"]:
    return jnp.arange(size)[None, :] < own.live[:, None]


def _weights(s: Float[Array, "P R S"], own: Owners, softcap: float | None) -> tuple[Array, Array, Array]:
    s = softmax.hide(softmax.cap(s, softcap), _live_slots(own, s.shape[-1])[:, None])
    m = softmax.row_max(s)
    p = softmax.query_weights(s, m)
    return m, jnp.sum(p, axis=-1), p


def _owners_queries(q: Float[Array, "X R H"], own: Owners) -> Float[Array, "P R H"]:
    return q[jnp.minimum(own.kv_head, q.shape[0] - 1)]


def of_floats(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    """Every page's partial. NaN in a dead value makes its page's o NaN."""
    in_place, by_chunks = (
        functools.partial(_in_place, options=options),
        functools.partial(_by_chunks, options=options),
    )
    chunks = chunks_of(own, pools.k.shape[1])
    if len(chunks.starts) < LARGE:
        return in_place(q, pools, own)
    few = 2 * chunks.busy < len(chunks.starts)
    return jax.lax.cond(few, by_chunks, in_place, q, pools, own)  # type: ignore[no-any-return]


def _in_place(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    m, l, p = _weights(products.scores(_owners_queries(q, own), pools.k, options.scale), own, options.softcap)
    return Partials(m, l, products.mix(p, pools.v), p)


def without_dead(
    p: Float[Array, "P R S"], v_pages: Float[Array, "P S H"], own: Owners
) -> Float[Array, "P R H"]:
    """The o of every page whatever dead slots hold; slow."""
    return products.mix_only(p, v_pages, _live_slots(own, v_pages.shape[1]))


def of_codes(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    """Every owned page's partial; those of chunks that no KV head owns stay empty."""
    return _by_chunks(q, pools, own, options)


def _by_chunks(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    (pool, size, _), (_, rows, h) = pools.k.shape, q.shape
    chunks, of_pages = chunks_of(own, size), pools.scales
    with_p = options.mass or of_pages is None  # of floats for ``without_dead``

    def one(i: Int[Array, ""], partials: Partials) -> Partials:
        part = Owners(chunks.cut(own.kv_head, i), chunks.cut(own.live, i))
        own_q, k, v = _owners_queries(q, part), chunks.cut(pools.k, i), chunks.cut(pools.v, i)
        scales = jax.tree.map(lambda x: chunks.cut(x, i), of_pages)
        if isinstance(scales, codes.Grouped):
            k, v = codes.values(k, scales, 0), codes.values(v, scales, 1)
        elif scales is not None:  # a page's scales are multiplied once a query and not once a slot
            own_q, k, v = own_q * scales[:, None, 0], codes.floats(k), codes.floats(v)
        m, l, p = _weights(products.scores(own_q, k, options.scale), part, options.softcap)
        o = products.mix(p, v)
        if scales is not None and not isinstance(scales, codes.Grouped):
            o = o * scales[:, None, 1]
        new = Partials(m, l, o, p if with_p else None)
        return jax.tree.map(lambda x, y: chunks.put(x, y, i), partials, new)

    empty = Partials(
        jnp.full((pool, rows), -jnp.inf, jnp.float32),
        jnp.zeros((pool, rows), jnp.float32),
        jnp.zeros((pool, rows, h), jnp.float32),
        jnp.zeros((pool, rows, size), jnp.float32) if with_p else None,
    )
    return jax.lax.fori_loop(0, chunks.busy, one, empty)


def combine(parts: Partials, own: Owners, kv_heads: int) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Partials of pages to partials of KV heads. (Measured faster than gathering by table.)"""
    top = jax.ops.segment_max(parts.m, own.kv_head, kv_heads)
    w = jnp.exp(parts.m - softmax.finite(top)[jnp.minimum(own.kv_head, kv_heads - 1)])
    l = jax.ops.segment_sum(w * parts.l, own.kv_head, kv_heads)
    o = jax.ops.segment_sum(w[..., None] * parts.o, own.kv_head, kv_heads)
    return softmax.finish(top, l, o)


def received(parts: Partials, lse: Float[Array, "X R"], own: Owners) -> Float[Array, "P R S"]:
    """Probability of each slot under its KV head's lse."""
    assert parts.p is not None
    share = jnp.exp(parts.m - softmax.finite(lse)[jnp.minimum(own.kv_head, lse.shape[0] - 1)])
    return parts.p * share[..., None]
