"""The step as two kernels on GPU, in Pallas' Triton: items of all streams, and their join.

  programs of a stream | 0 .. R - 1: 128 slots of the ring each | R ..: even shares of its pages |

The programs of a grid run in no order, so nobody may read a slot that another one writes. The program with
the new token's slot takes the leaving token out of it, is the only one that reads either, and does with the
leaving one all there is to do: one more key of its own, the page's slot, φ. The programs of the pages see
the list as it was before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.phi.api import Summary
from studies.one_kernel.arrays import Cache, Token

if TYPE_CHECKING:
    from jaxtyping import Array

TILE = 64
RING = 128
"""Ring slots of a program."""

PROGRAMS, ITEMS = 528, 32
"""Of all streams at least, and of one: as those of ``ragged_decode``."""

LEAST = (128, 512)
"""Slots of an item at least: where ITEMS is enough of them, and where it is not."""

ROWS = 16
"""Queries of a group, padded to what a product takes."""

FEATURES = 32
"""Of φ, taken at once."""


class Plan(NamedTuple):
    """KV heads, queries of a group, head dim, ring, page, entries, features; items of ring and pages.

    ``compiled`` is whether threads run at the same time: not on an interpreter.
    """

    heads: int
    g: int
    h: int
    window: int
    size: int
    entries: int
    f: int
    ring: int
    items: int
    least: int
    compiled: bool


class Stream(NamedTuple):
    """A program's stream.

    Attributes:
      x: which.
      item: which of its programs this is.
      seen, length: tokens before the step, in all and paged.
      at: slot of the new token in the ring.
      enters, leaves: whether there is a new token, and one that goes to the pages.
    """

    x: Array
    item: Array
    seen: Array
    length: Array
    at: Array
    enters: Array
    leaves: Array


def _all_loaded(plan: Plan) -> None:
    """Small arrays are loaded by several threads each: none may store before all have."""
    if plan.compiled:
        compat.plt.debug_barrier()


def _grid(*axes: Array) -> tuple[Array, ...]:
    """Indices of a tile: a column, and a row of channels or features, each as large as the tile."""
    return tuple(jnp.broadcast_to(a, jnp.broadcast_shapes(*(b.shape for b in axes))) for a in axes)


def _line(ref: Any, first: Array, h: int) -> Any:
    channel = jnp.arange(h, dtype=jnp.int32)
    return ref.at[jnp.full((h,), first, jnp.int32), channel]


def _turned(load: Callable[[Array], Array], cos: Any, sin: Any, b: Array, h: int) -> Array:
    """RoPE of what ``load`` gives of these channels, without cutting registers in two."""
    channel = jnp.arange(h, dtype=jnp.int32)
    other = jnp.where(channel < h // 2, channel + h // 2, channel - h // 2)
    sign = jnp.where(channel < h // 2, -1.0, 1.0)
    row = jnp.full((h,), b, jnp.int32)
    c, s = (compat.load(x.at[row, channel], mask=channel < h) for x in (cos, sin))
    return load(channel).astype(jnp.float32) * c + load(other).astype(jnp.float32) * (s * sign)


def _stream(plan: Plan, seen: Any, length: Any, admit: Any) -> Stream:
    x = pl.program_id(1)
    n = seen[jax.lax.div(x, plan.heads)]
    return Stream(
        x, pl.program_id(0), n, length[x], jax.lax.rem(jnp.maximum(n, 0), plan.window), n >= 0, admit[x] > 0
    )


def _queries(plan: Plan, of: Stream, q: Any, cos: Any, sin: Any) -> Array:
    """[ROWS, H], turned, as a cache would hold them."""

    def load(channel: Array) -> Array:
        row, at = _grid(jnp.arange(ROWS, dtype=jnp.int32)[:, None], channel[None])
        return compat.load(q.at[jnp.full(row.shape, of.x, jnp.int32), row, at], mask=row < plan.g)

    return _turned(load, cos, sin, jax.lax.div(of.x, plan.heads), plan.h).astype(jnp.bfloat16)


def _grown(plan: Plan, q: Array, stats: tiles.Stats, k: Array, v: Array, see: Array) -> tiles.Stats:
    s = tiles.product_nt(q, k) * plan.h**-0.5
    return tiles.grow(stats, s, see[None, :], lambda p: tiles.product_nn(p.astype(v.dtype), v))


def _pages(plan: Plan, of: Stream, q: Array, table: Any, pools: Any, stats: tiles.Stats) -> tiles.Stats:
    """The statistics after this program's share of the pages."""
    count = pl.cdiv(of.length, TILE)
    share = jnp.maximum(pl.cdiv(count, plan.items), plan.least)
    begin = (of.item - plan.ring) * share

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        see = slot < of.length
        entry = jnp.full((TILE,), of.x, jnp.int32), slot // plan.size
        page = compat.load(table.at[entry], mask=see)
        at = _grid(page[:, None], (slot % plan.size)[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        mask = jnp.broadcast_to(see[:, None], at[0].shape)
        k, v = (compat.load(pool.at[at], mask=mask) for pool in pools)
        return _grown(plan, q, stats, k, v, see)

    return jax.lax.fori_loop(begin, jnp.minimum(begin + share, count), step, stats)


def _ring(
    plan: Plan, of: Stream, q: Array, rings: Any, new: tuple[Array, Array], stats: tiles.Stats
) -> tiles.Stats:
    """The statistics after this program's slots of the ring, the new token in its own."""
    begin = of.item * (RING // TILE)

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        see = (slot <= of.seen) & (slot < plan.window)
        at = _grid(slot[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        mine = (at[0] == of.at) & of.enters
        mask = jnp.broadcast_to(see[:, None], at[0].shape) & ~mine
        where = jnp.full(at[0].shape, of.x, jnp.int32), *at
        k, v = (jnp.where(mine, x[None], compat.load(r.at[where], mask=mask)) for r, x in zip(rings, new))
        return _grown(plan, q, stats, k, v, see)

    end = jnp.minimum(begin + RING // TILE, pl.cdiv(plan.window, TILE))
    return jax.lax.fori_loop(begin, end, step, stats)


class Features(NamedTuple):
    """φ's references: as in ``Token`` and ``Summary``, before and after."""

    absorb: Any
    log_q: Any
    log_k: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]


def _completed(plan: Plan, of: Stream, refs: Features, old: Array, stats: tiles.Stats) -> tiles.Stats:
    """The statistics after φ, which has absorbed the leaving value."""
    takes = refs.absorb[of.x] > 0

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        feature = i * FEATURES + jnp.arange(FEATURES, dtype=jnp.int32)
        there = feature < plan.f
        line = jnp.full((FEATURES,), of.x, jnp.int32), feature
        shift, weight = (compat.load(x.at[line], mask=there) for x in refs.before[:2])
        log_k = compat.load(refs.log_k.at[line], mask=there)
        place = _grid(feature[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        tile, inside = (jnp.full(place[0].shape, of.x, jnp.int32), *place), place[0] < plan.f
        values = compat.load(refs.before[2].at[tile], mask=inside)
        _all_loaded(plan)
        top = jnp.where(takes, jnp.maximum(shift, log_k), shift)
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        keep = jnp.where(takes, jnp.exp(shift - finite), 1.0)
        more = jnp.where(takes, jnp.exp(log_k - finite), 0.0)
        weight = keep * weight + more
        values = keep[:, None] * values + more[:, None] * jnp.where(takes, old, 0.0)[None]
        compat.store(refs.after[0].at[line], top, mask=there & takes)
        compat.store(refs.after[1].at[line], weight, mask=there & takes)
        compat.store(refs.after[2].at[tile], values, mask=inside & takes)
        some = there & (weight != 0)
        u = jnp.where(some, weight, 1.0)
        row, at = _grid(jnp.arange(ROWS, dtype=jnp.int32)[:, None], feature[None])
        query = jnp.full(row.shape, of.x, jnp.int32), row, at
        scores = compat.load(refs.log_q.at[query], mask=(row < plan.g) & (at < plan.f))
        scores = scores + (jnp.where(some, top, 0.0) + jnp.log(u))[None]
        see = some[None] & ~(scores <= tiles.HIDDEN)
        return tiles.grow(stats, scores, see, lambda p: tiles.product_nn(p / u[None], values))

    return jax.lax.fori_loop(0, pl.cdiv(plan.f, FEATURES), step, stats)


def _one(x: Array) -> Array:
    """[ROWS, H] with x in the first row."""
    first = jax.lax.broadcasted_iota(jnp.int32, (ROWS, x.shape[0]), 0) == 0
    return jnp.where(first, x[None], jnp.zeros((), x.dtype))


def _left(plan: Plan, of: Stream, q: Array, table: Any, rings: Any, pages: Any, new: Any, stats: Any) -> Any:
    """The leaving token (k, v), which is now in its page, and the statistics after it."""
    channel = jnp.arange(plan.h, dtype=jnp.int32)
    stream = jnp.full((plan.h,), of.x, jnp.int32)
    slot = stream, jnp.full((plan.h,), of.at, jnp.int32), channel
    old = [compat.load(ring.at[slot], mask=channel < plan.h) for ring in rings]
    entry = jnp.minimum(jax.lax.div(of.length, plan.size), plan.entries - 1)
    page = jnp.full((plan.h,), table[of.x, entry], jnp.int32)
    to = page, jnp.full((plan.h,), jax.lax.rem(of.length, plan.size), jnp.int32), channel
    _all_loaded(plan)
    for ring, pool, x, fresh in zip(rings, pages, old, new):
        compat.store(pool.at[to], x, mask=(channel < plan.h) & of.leaves)
        compat.store(ring.at[slot], fresh, mask=(channel < plan.h) & of.enters)
    see = (jnp.arange(ROWS, dtype=jnp.int32) == 0) & of.leaves
    k, v = (_one(jnp.where(of.leaves, x, jnp.zeros((), x.dtype))) for x in old)
    return old, _grown(plan, q, stats, k, v, see)


def _read(plan: Plan) -> Callable[..., None]:
    """The kernel: the partial of one item."""

    def body(table: Any, seen: Any, length: Any, admit: Any, *refs: Any) -> None:
        q, k, v, cos, sin, *token = refs[: 5 + 3 * bool(plan.f)]
        state = refs[5 + 3 * bool(plan.f) :]
        many = 4 + 3 * bool(plan.f)
        before, (o, m, l), after = state[:many], state[many : many + 3], state[many + 3 :]
        of = _stream(plan, seen, length, admit)
        queries, start = _queries(plan, of, q, cos, sin), tiles.start(ROWS, plan.h)
        b = jax.lax.div(of.x, plan.heads)

        def line(ref: Any) -> Callable[[Array], Array]:
            return lambda at: compat.load(ref.at[jnp.full(at.shape, of.x, jnp.int32), at], mask=at < plan.h)

        def ring() -> tiles.Stats:
            channel = jnp.arange(plan.h, dtype=jnp.int32)
            new = _turned(line(k), cos, sin, b, plan.h).astype(jnp.bfloat16), line(v)(channel)
            stats = _ring(plan, of, queries, before[:2], new, start)

            def owner(stats: tiles.Stats) -> tiles.Stats:
                old, stats = _left(plan, of, queries, table, after[:2], after[2:4], new, stats)
                if not plan.f:
                    return stats
                features = Features(*[*token, before[4:], after[4:]])
                return _completed(plan, of, features, old[1].astype(jnp.float32), stats)

            return jax.lax.cond(of.item == jax.lax.div(of.at, RING), owner, lambda stats: stats, stats)

        top, total, found = jax.lax.cond(
            of.item < plan.ring, ring, lambda: _pages(plan, of, queries, table, before[2:4], start)
        )
        row = jnp.arange(ROWS, dtype=jnp.int32)
        here = tuple(jnp.full((ROWS,), a, jnp.int32) for a in (of.x, of.item))
        compat.store(m.at[*here, row], top[:, 0], mask=row < plan.g)
        compat.store(l.at[*here, row], total[:, 0], mask=row < plan.g)
        at = _grid(row[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        wide = tuple(jnp.full(at[0].shape, a, jnp.int32) for a in (of.x, of.item))
        compat.store(o.at[*wide, *at], found, mask=at[0] < plan.g)

    return body


def _join(plan: Plan) -> Callable[..., None]:
    """The kernel: (partials of a stream) -> (out, lse) of one query, in one order always."""
    most = pl.next_power_of_2(plan.ring + plan.items)

    def body(o: Any, m: Any, l: Any, out: Any, lse: Any) -> None:
        query, x = pl.program_id(0), pl.program_id(1)
        item, channel = jnp.arange(most, dtype=jnp.int32), jnp.arange(plan.h, dtype=jnp.int32)
        there = item < plan.ring + plan.items
        at = jnp.full((most,), x, jnp.int32), item, jnp.full((most,), query, jnp.int32)
        of = compat.load(l.at[at], mask=there)
        top = compat.load(m.at[at], mask=there, other=tiles.HIDDEN)
        top = jnp.where(of != 0, top, tiles.HIDDEN)
        shift = jnp.max(top)
        shift = jnp.where(shift > tiles.HIDDEN, shift, 0.0)
        scale = jnp.where(of != 0, jnp.exp(top - shift), 0.0)
        total = jnp.sum(scale * of)
        rows, channels = _grid(item[:, None], channel[None])
        stream, mine = (jnp.full(rows.shape, a, jnp.int32) for a in (x, query))
        part = compat.load(o.at[stream, rows, mine, channels], mask=rows < plan.ring + plan.items)
        found = jnp.sum(jnp.where(scale[:, None] != 0, scale[:, None] * part, 0.0), axis=0)
        safe = jnp.where(total != 0, total, 1.0)
        out[...] = jnp.where(total != 0, found / safe, 0.0).astype(out.dtype)
        lse[0] = jnp.where(total != 0, shift + jnp.log(safe), -jnp.inf)

    return body


def _plan(cache: Cache, token: Token, compiled: bool) -> Plan:
    (b, heads, window, h), size = cache.ring_k.shape, cache.k_pages.shape[1]
    if h & (h - 1) or size & (size - 1) or token.q.shape[1] // heads > ROWS:
        raise ValueError(f"heads of {h}, pages of {size}: not in this prototype")
    f = 0 if cache.summary is None else cache.summary.weight.shape[-1]
    items, entries = -(-PROGRAMS // (b * heads)), token.table.shape[2]
    least = LEAST[items < ITEMS] // TILE
    items = max(1, min(max(items, ITEMS), -(-entries * size // (least * TILE))))
    ring = -(-window // RING)
    g = token.q.shape[1] // heads
    return Plan(heads, g, h, window, size, entries, f, ring, items, max(1, least), compiled)


@functools.partial(jax.jit, static_argnames="interpret", donate_argnums=0)
def step(cache: Cache, token: Token, *, interpret: Any = False) -> tuple[Array, Array, Cache]:
    """As ``today.step``."""
    plan, summary, (b, heads, window, h) = (
        _plan(cache, token, interpret is False),
        cache.summary,
        cache.ring_k.shape,
    )
    x, items = b * heads, plan.ring + plan.items
    numbers = [token.table.reshape(x, -1), token.seen, token.length.reshape(x), token.admit.reshape(x)]
    lines = [
        token.q.reshape(x, plan.g, h),
        token.k.reshape(x, h),
        token.v.reshape(x, h),
        token.cos,
        token.sin,
    ]
    state = [a.reshape(x, window, h) for a in cache[:2]] + [cache.k_pages, cache.v_pages]
    if summary is not None:
        lines += [token.absorb.reshape(x), token.log_q.reshape(x, plan.g, plan.f)]
        lines += [token.log_k.reshape(x, plan.f)]
        state += [a.reshape(x, *a.shape[2:]) for a in summary]
    inputs, anywhere = [*numbers, *lines], pl.BlockSpec(memory_space=pl.ANY)
    parts = [jax.ShapeDtypeStruct((x, items, plan.g, *more), jnp.float32) for more in ((h,), (), ())]
    slots = x * (window + plan.entries * plan.size)
    o, m, l, *after = pl.pallas_call(
        _read(plan),
        grid=(items, x),
        in_specs=[anywhere] * (len(inputs) + len(state)),
        out_specs=[anywhere] * (3 + len(state)),
        out_shape=[*parts, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in state)],
        input_output_aliases={len(inputs) + i: 3 + i for i in range(len(state))},
        compiler_params=compat.triton_params(warps=4, stages=2),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * plan.g * h, transcendentals=slots * plan.g, bytes_accessed=4 * slots * h
        ),
        interpret=interpret,
        name="ragged_decode_step",
    )(*inputs, *state)
    out, lse = pl.pallas_call(
        _join(plan),
        grid=(plan.g, x),
        in_specs=[anywhere] * 3,
        out_specs=[
            pl.BlockSpec((None, None, h), lambda r, i: (i, r, 0)),
            pl.BlockSpec((None, 1), lambda r, i: (i, r)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((x, plan.g, h), token.q.dtype),
            jax.ShapeDtypeStruct((x, plan.g), jnp.float32),
        ],
        compiler_params=compat.triton_params(warps=4, stages=1),
        interpret=interpret,
        name="ragged_decode_join",
    )(o, m, l)
    shape = token.q.shape
    if summary is not None:
        summary = Summary(*(a.reshape(old.shape) for a, old in zip(after[4:], summary)))
    ring_k, ring_v = (a.reshape(b, heads, window, h) for a in after[:2])
    written = Cache(ring_k, ring_v, after[2], after[3], summary)
    return out.reshape(shape), lse.reshape(shape[:2]), written
