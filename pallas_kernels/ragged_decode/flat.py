"""The flat form of ragged_decode: read the pool in place and bring the queries to the pages.

Gathering a KV head's pages costs several times reading them (5 ms against 0.9 ms for 8192 slots of
5 heads, page 64, two CPU cores). So no key or value moves: every page gets its owner's queries,
answers with a partial of its own, and the partials of a KV head's pages are summed at the end.

  pool       page 0   page 1   page 2   page 3 ...
  owner      (0, 1)   (1, 0)   none     (0, 1)       from the table, one small scatter
  partial    m l o    m l o    -        m l o        segment max and sum by owner

A float pool is one product in place: cutting it into chunks copies it. For a large one it matters how its
pages lie.

* Most of them nobody's: one text in a batch of sixteen rows, as free pages are given out from the lowest on;
  a list of a few first tokens. Then small chunks with an owner are read one by one, and no others.
* As a prompt's do, KV head by KV head. Then a float32 chunk is read as one long page: products of 64 or 256
  keys are too short for a second thread, and for the registers of one. The few pages in it of other KV heads
  are read by small chunks. (Steps that read 2 KV heads of 32,768 tokens take 1.13 to 1.23 times those of a
  ring, all in place 1.29 to 1.63: ``own`` of ``python -m benchmarks drafted``, two CPU cores.)

On a CPU bfloat16 is always read in place: XLA makes all of it float32 for a loop, and is up to three times as
slow wherever there is a choice (65,536 slots by 15 queries 7.3 ms, 3.0 without one).

A pool of codes is read in chunks of pages, which become float while they are in a core's own cache, and
chunks that no KV head owns are skipped: the pool is never converted as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

LARGE = 4 * CHUNK
"""Slots from which on it matters how the pages of a float pool lie."""

SMALL = 1024
"""Slots of a chunk of a float pool, copied to be read: 0.04 to 0.12 ms, where 65,536 in place take 1.7."""

FEW = 4
"""Small chunks are read one by one where they are less than one of so many."""

MIXED = 8
"""Long pages are read where at most one of so many small chunks has pages of other KV heads."""


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


def chunks_of(own: Owners, size: int, slots: int) -> Chunks:
    """The chunks, of about so many slots, of a pool of pages of ``size``."""
    pool = own.live.shape[0]
    pages = min(max(1, slots // size), pool)
    # The last chunk starts early enough to fit, and repeats pages the one before it has done.
    starts = jnp.minimum(jnp.arange(-(-pool // pages)) * pages, pool - pages)
    busy = jnp.any(own.live[starts[:, None] + jnp.arange(pages)[None, :]] > 0, axis=1)
    return Chunks(starts[jnp.argsort(~busy, stable=True)], jnp.sum(busy), pages)


def long_page(pool: int, size: int) -> int:
    """Pages that are read as one: about a chunk's, such that all are of one size; 0 where that cannot be."""
    wanted = CHUNK // size
    fits = [pages for pages in range(max(2, wanted // 2), 2 * wanted + 1) if pool % pages == 0]
    return min(fits, key=lambda pages: abs(pages - wanted), default=0)


class LongPages(NamedTuple):
    """A pool as few long pages.

    Attributes:
      kv_head: that owns most pages of each.
      own: their live slots, page by page.
      others: the pages that are another KV head's.
      pay: are these few enough?
    """

    kv_head: Int[Array, " C"]
    own: Owners
    others: Owners
    pay: Bool[Array, ""]

    def joined(self, x: Num[Array, "P S ..."]) -> Num[Array, "C Z ..."]:
        """Pages as long pages."""
        return x.reshape(len(self.kv_head), -1, *x.shape[2:])


def _long_pages(own: Owners, kv_heads: int, size: int) -> LongPages | None:
    """How a pool of pages of ``size`` is read by long ones; None where it cannot be."""
    if not (pages := long_page(len(own.live), size)):
        return None
    by_long = own.kv_head.reshape(-1, pages)
    first, last = by_long.min(axis=1), jnp.where(by_long < kv_heads, by_long, -1).max(axis=1)
    count = [(by_long == one[:, None]).sum(axis=1) for one in (first, last)]
    kv_head = jnp.where(count[0] >= count[1], first, last)
    theirs = (by_long == kv_head[:, None]).reshape(-1)
    others = own._replace(live=jnp.where(theirs, 0, own.live))
    small = chunks_of(others, size, SMALL)
    few = MIXED * small.busy <= len(small.starts)
    return LongPages(kv_head, own._replace(live=jnp.where(theirs, own.live, 0)), others, few)


class Partials(NamedTuple):
    """(m, l, o) of pages, each alone, whose they are, and with mass their p = exp(scores - m)."""

    kv_head: Int[Array, " P"]
    m: Float[Array, "P R"]
    l: Float[Array, "P R"]
    o: Float[Array, "P R H"]
    p: Float[Array, "P R S"] | None


def _live_slots(own: Owners, size: int) -> Bool[Array, "P S"]:
    return jnp.arange(size)[None, :] < own.live[:, None]


def _weights(
    s: Float[Array, "P R S"], live: Bool[Array, "P S"], softcap: float | None
) -> tuple[Array, Array, Array]:
    s = softmax.hide(softmax.cap(s, softcap), live[:, None])
    m = softmax.row_max(s)
    p = softmax.query_weights(s, m)
    return m, jnp.sum(p, axis=-1), p


def _queries_of(q: Float[Array, "X R H"], kv_head: Int[Array, " P"]) -> Float[Array, "P R H"]:
    """Those of each page's owner."""
    return q[jnp.minimum(kv_head, q.shape[0] - 1)]


def of_floats(
    q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Partials | None]:
    """Output and lse of every KV head, and partials if there is mass. NaN in a dead value makes NaN."""
    pool, size, _ = pools.k.shape
    is_float32 = pools.k.dtype == jnp.float32

    def by(way: Callable[..., Partials]) -> tuple[Array, Array, Partials | None]:
        parts = way(q, pools, own, options)
        return *combine(parts, q.shape[0]), parts if options.mass else None

    def as_it_lies() -> tuple[Array, Array, Partials | None]:
        chunks = chunks_of(own, size, SMALL)
        ways: list[Callable[..., Partials]] = [_in_place, functools.partial(_by_chunks, slots=SMALL)]
        chosen = jnp.where(FEW * chunks.busy < len(chunks.starts), 1, 0)
        if is_float32 and not options.mass and (long := _long_pages(own, q.shape[0], size)):
            ways.append(functools.partial(_by_long_pages, long=long))
            chosen = jnp.where((chosen == 0) & long.pay, 2, chosen)
        return jax.lax.switch(chosen, [functools.partial(by, way) for way in ways])  # type: ignore[no-any-return]

    if pool * size < LARGE:
        return by(_in_place)
    if is_float32:
        return as_it_lies()
    in_place = functools.partial(by, _in_place)
    return jax.lax.platform_dependent(cpu=in_place, default=as_it_lies)  # type: ignore[no-any-return]


def _in_place(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    s = products.scores(_queries_of(q, own.kv_head), pools.k, options.scale)
    m, l, p = _weights(s, _live_slots(own, pools.k.shape[1]), options.softcap)
    return Partials(own.kv_head, m, l, products.mix(p, pools.v), p if options.mass else None)


def _by_long_pages(
    q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options, long: LongPages
) -> Partials:
    """Partials of long pages, then of the pages in them that are another's."""
    s = products.scores(_queries_of(q, long.kv_head), long.joined(pools.k), options.scale)
    m, l, p = _weights(s, long.joined(_live_slots(long.own, pools.k.shape[1])), options.softcap)
    parts = Partials(long.kv_head, m, l, products.mix(p, long.joined(pools.v)), None)
    rest = _by_chunks(q, pools, long.others, options, SMALL)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), parts, rest)


def without_dead(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    """``of_floats`` whatever dead slots hold; slow."""
    partials, live = _in_place(q, pools, own, options._replace(mass=True)), _live_slots(own, pools.k.shape[1])
    assert partials.p is not None
    return partials._replace(o=products.mix_only(partials.p, pools.v, live))


def of_codes(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options) -> Partials:
    """Every owned page's partial; those of chunks that no KV head owns stay empty."""
    return _by_chunks(q, pools, own, options, CHUNK)


def _by_chunks(q: Float[Array, "X R H"], pools: Pools, own: Owners, options: Options, slots: int) -> Partials:
    """Partials of every page, those of chunks that nobody owns empty."""
    (pool, size, _), (_, rows, h), of_pages = pools.k.shape, q.shape, pools.scales
    chunks = chunks_of(own, size, slots)

    def one(i: Int[Array, ""], partials: Partials) -> Partials:
        part = Owners(chunks.cut(own.kv_head, i), chunks.cut(own.live, i))
        own_q, k, v = _queries_of(q, part.kv_head), chunks.cut(pools.k, i), chunks.cut(pools.v, i)
        scales = jax.tree.map(lambda x: chunks.cut(x, i), of_pages)
        if isinstance(scales, codes.Grouped):
            k, v = codes.values(k, scales, 0), codes.values(v, scales, 1)
        elif scales is not None:  # a page's scales are multiplied once a query and not once a slot
            own_q, k, v = own_q * scales[:, None, 0], codes.floats(k), codes.floats(v)
        s = products.scores(own_q, k, options.scale)
        m, l, p = _weights(s, _live_slots(part, size), options.softcap)
        o = products.mix(p, v)
        if scales is not None and not isinstance(scales, codes.Grouped):
            o = o * scales[:, None, 1]
        new = Partials(part.kv_head, m, l, o, p if options.mass else None)
        return jax.tree.map(lambda x, y: chunks.put(x, y, i), partials, new)

    empty = Partials(
        own.kv_head,
        jnp.full((pool, rows), -jnp.inf, jnp.float32),
        jnp.zeros((pool, rows), jnp.float32),
        jnp.zeros((pool, rows, h), jnp.float32),
        jnp.zeros((pool, rows, size), jnp.float32) if options.mass else None,
    )
    return jax.lax.fori_loop(0, chunks.busy, one, empty)


def combine(parts: Partials, kv_heads: int) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Partials of pages to partials of KV heads. (Measured faster than gathering by table.)"""
    top = jax.ops.segment_max(parts.m, parts.kv_head, kv_heads)
    w = jnp.exp(parts.m - softmax.finite(top)[jnp.minimum(parts.kv_head, kv_heads - 1)])
    l = jax.ops.segment_sum(w * parts.l, parts.kv_head, kv_heads)
    o = jax.ops.segment_sum(w[..., None] * parts.o, parts.kv_head, kv_heads)
    return softmax.finish(top, l, o)


def received(parts: Partials, lse: Float[Array, "X R"]) -> Float[Array, "P R S"]:
    """Probability of each slot under its KV head's lse."""
    assert parts.p is not None
    share = jnp.exp(parts.m - softmax.finite(lse)[jnp.minimum(parts.kv_head, lse.shape[0] - 1)])
    return parts.p * share[..., None]
