"""decode_step on GPU, in Pallas' Triton: items of all streams, and their join.

  programs of a stream | 0 .. R - 1: 128 slots of the ring each | R ..: even shares of its pages |

The programs of a grid run in no order, so nobody may read a slot that another one writes. The program with
the new token's slot takes the leaving token out of it, is the only one that reads either, and does with the
leaving one all there is to do: one more key of its own, and the page's slot. The programs of the pages see
the list as it was before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.decode_step.call import ROWS, Cache, Lists, Token, refusal
from pallas_kernels.dispatch import Unsupported

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from pallas_kernels.tuning import Blocks, Tuned

TILE = 64
"""Slots of a tile; of heads of 256 half of it: otherwise registers spill."""

RING = 128
"""Ring slots of a program."""

PROGRAMS, ITEMS = 528, 32
"""Of all streams at least, and of one: as those of ``ragged_decode``."""

LEAST = (128, 512)
"""Slots of an item at least: where ITEMS is enough of them, and where it is not."""


JOINED = 1 << 14
"""Numbers of a query's partials, most of a stream: the join holds them in registers."""


class Plan(NamedTuple):
    """KV heads, queries of a group, head dim, ring, page, pages of the pool, entries of a list; slots of a
    tile, items of ring and pages, tiles of an item at least; what scores are multiplied with.

    ``compiled`` is whether threads run at the same time: not on an interpreter.
    """

    heads: int
    g: int
    h: int
    window: int
    size: int
    pool: int
    entries: int
    tile: int
    ring: int
    items: int
    least: int
    scale: float
    compiled: bool
    blocks: Blocks

    @property
    def ring_tiles(self) -> int:
        """Tiles of an item of the ring."""
        return max(1, RING // self.tile)


class Stream(NamedTuple):
    """A program's stream.

    Attributes:
      x: which.
      item: which of its programs this is.
      seen, length: tokens before the step, in all and paged.
      at: slot of the new token in the ring.
    """

    x: Array
    item: Array
    seen: Array
    length: Array
    at: Array


def _grid(*axes: Array) -> tuple[Array, ...]:
    """Indices of a tile: a column, and a row of channels, each as large as the tile."""
    return tuple(jnp.broadcast_to(a, jnp.broadcast_shapes(*(b.shape for b in axes))) for a in axes)


def _stream(plan: Plan, seen: Any, length: Any) -> Stream:
    x = pl.program_id(1)
    n, held = seen[jax.lax.div(x, plan.heads)], jnp.minimum(length[x], plan.entries * plan.size)
    return Stream(x, pl.program_id(0), n, held, jax.lax.rem(jnp.maximum(n, 0), plan.window))


def _queries(plan: Plan, of: Stream, q: Any) -> Array:
    """[ROWS, H]; rows beyond the group's are zeros."""
    row, at = _grid(jnp.arange(ROWS, dtype=jnp.int32)[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
    return compat.load(q.at[jnp.full(row.shape, of.x, jnp.int32), row, at], mask=row < plan.g)


def _grown(plan: Plan, q: Array, stats: tiles.Stats, k: Array, v: Array, see: Array) -> tiles.Stats:
    s = tiles.product_nt(q, k) * plan.scale
    return tiles.grow(stats, s, see[None, :], lambda p: tiles.product_nn(p.astype(v.dtype), v))


def _pages(plan: Plan, of: Stream, q: Array, table: Any, pools: Any, stats: tiles.Stats) -> tiles.Stats:
    """The statistics after this program's share of the pages."""
    count = pl.cdiv(of.length, plan.tile)
    share = jnp.maximum(pl.cdiv(count, plan.items), plan.least)
    begin = (of.item - plan.ring) * share

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32)
        see = slot < of.length
        entry = jnp.full((plan.tile,), of.x, jnp.int32), slot // plan.size
        page = jnp.clip(compat.load(table.at[entry], mask=see), 0, plan.pool - 1)
        at = _grid(page[:, None], (slot % plan.size)[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        mask = jnp.broadcast_to(see[:, None], at[0].shape)
        k, v = (compat.load(pool.at[at], mask=mask) for pool in pools)
        return _grown(plan, q, stats, k, v, see)

    return jax.lax.fori_loop(begin, jnp.minimum(begin + share, count), step, stats)


def _ring(
    plan: Plan, of: Stream, q: Array, rings: Any, new: tuple[Array, ...], stats: tiles.Stats
) -> tiles.Stats:
    """The statistics after this program's slots of the ring, the new token in its own."""
    begin = of.item * plan.ring_tiles

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32)
        see = (slot <= of.seen) & (slot < plan.window)
        at = _grid(slot[:, None], jnp.arange(plan.h, dtype=jnp.int32)[None])
        mine = (at[0] == of.at) & (of.seen >= 0)
        mask = jnp.broadcast_to(see[:, None], at[0].shape)
        where = jnp.full(at[0].shape, of.x, jnp.int32), *at
        k, v = (jnp.where(mine, x[None], compat.load(r.at[where], mask=mask)) for r, x in zip(rings, new))
        return _grown(plan, q, stats, k, v, see)

    end = jnp.minimum(begin + plan.ring_tiles, pl.cdiv(plan.window, plan.tile))
    return jax.lax.fori_loop(begin, end, step, stats)


def _one(x: Array) -> Array:
    """[ROWS, H] with x in the first row."""
    first = jax.lax.broadcasted_iota(jnp.int32, (ROWS, x.shape[0]), 0) == 0
    return jnp.where(first, x[None], jnp.zeros((), x.dtype))


def _exchanged(
    plan: Plan, of: Stream, q: Array, table: Any, enters: Any, after: Any, new: tuple[Array, ...], stats: Any
) -> tiles.Stats:
    """The statistics after the leaving token, which is now in its page, and the new one in its slot."""
    channel = jnp.arange(plan.h, dtype=jnp.int32)
    rings, pools, there = after[:2], after[2:], channel < plan.h
    slot = jnp.full((plan.h,), of.x, jnp.int32), jnp.full((plan.h,), of.at, jnp.int32), channel
    old = [compat.load(ring.at[slot], mask=there) for ring in rings]
    entry = jax.lax.div(of.length, plan.size)
    page = table[of.x, jnp.minimum(entry, plan.entries - 1)]
    leaves = (enters[of.x] > 0) & (of.seen >= plan.window) & (entry < plan.entries)
    leaves &= (page >= 0) & (page < plan.pool)
    to = (
        jnp.full((plan.h,), jnp.clip(page, 0, plan.pool - 1), jnp.int32),
        jnp.full((plan.h,), jax.lax.rem(of.length, plan.size), jnp.int32),
        channel,
    )
    if plan.compiled:  # a line is loaded by several threads: none may store before all have
        compat.plt.debug_barrier()
    for ring, pool, x, fresh in zip(rings, pools, old, new):
        compat.store(pool.at[to], x, mask=there & leaves)
        compat.store(ring.at[slot], fresh, mask=there & (of.seen >= 0))
    k, v = (_one(jnp.where(leaves, x, jnp.zeros((), x.dtype))) for x in old)
    return _grown(plan, q, stats, k, v, (jnp.arange(ROWS, dtype=jnp.int32) == 0) & leaves)


def _read(plan: Plan) -> Callable[..., None]:
    """The kernel: the partial of one item."""

    def body(table: Any, seen: Any, length: Any, enters: Any, *refs: Any) -> None:
        q, *token = refs[:3]
        before, (o, m, l), after = refs[3:7], refs[7:10], refs[10:]
        of = _stream(plan, seen, length)
        queries, start = _queries(plan, of, q), tiles.start(ROWS, plan.h)

        def ring() -> tiles.Stats:
            channel = jnp.arange(plan.h, dtype=jnp.int32)
            line = jnp.full((plan.h,), of.x, jnp.int32), channel
            new = tuple(compat.load(x.at[line], mask=channel < plan.h) for x in token)
            stats = _ring(plan, of, queries, before[:2], new, start)

            def owner(stats: tiles.Stats) -> tiles.Stats:
                return _exchanged(plan, of, queries, table, enters, after, new, stats)

            mine = of.item == jax.lax.div(of.at, plan.ring_tiles * plan.tile)
            return jax.lax.cond(mine, owner, lambda stats: stats, stats)

        top, total, found = jax.lax.cond(
            of.item < plan.ring, ring, lambda: _pages(plan, of, queries, table, before[2:], start)
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


def _plan(token: Token, cache: Cache, lists: Lists, scale: float, blocks: Tuned, compiled: bool) -> Plan:
    if why := refusal("triton", token.q, cache, lists.table):
        raise Unsupported(why)
    (b, heads, window, h), (pool, size, _), entries = (
        cache.ring_k.shape,
        cache.k_pages.shape,
        lists.table.shape[2],
    )
    items = -(-PROGRAMS // (b * heads))
    own = tuning.Blocks(k=TILE if h <= 128 else TILE // 2, item=LEAST[items < ITEMS], warps=4, stages=2)
    found = tuning.pick(blocks, "step", cache.k_pages.dtype, h, own)
    least, ring = max(1, found.item // found.k), -(-window // max(RING, found.k))
    items = min(max(items, ITEMS), -(-entries * size // (least * found.k)), JOINED // h - ring)
    g = token.q.shape[1] // heads
    return Plan(heads, g, h, window, size, pool, entries, found.k, ring, items, least, scale, compiled, found)


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "blocks"))
def decode_step(
    token: Token, cache: Cache, lists: Lists, *, scale: float, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Cache]:
    """See ``api.decode_step``."""
    plan = _plan(token, cache, lists, scale, blocks, interpret is False)
    (b, heads, window, h), anywhere = cache.ring_k.shape, pl.BlockSpec(memory_space=pl.ANY)
    x, items = b * heads, plan.ring + plan.items
    inputs = [lists.table.reshape(x, -1), lists.seen, lists.length.reshape(x), lists.enters.reshape(x)]
    inputs += [token.q.reshape(x, plan.g, h), token.k.reshape(x, h), token.v.reshape(x, h)]
    state = [*(ring.reshape(x, window, h) for ring in cache[:2]), *cache[2:]]
    parts = [jax.ShapeDtypeStruct((x, items, plan.g, *more), jnp.float32) for more in ((h,), (), ())]
    slots = x * (window + plan.entries * plan.size)
    o, m, l, *after = pl.pallas_call(
        _read(plan),
        grid=(items, x),
        in_specs=[anywhere] * (len(inputs) + len(state)),
        out_specs=[anywhere] * (3 + len(state)),
        out_shape=[*parts, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in state)],
        input_output_aliases={len(inputs) + i: 3 + i for i in range(len(state))},
        compiler_params=compat.triton_params(warps=plan.blocks.warps, stages=plan.blocks.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * plan.g * h,
            transcendentals=slots * plan.g,
            bytes_accessed=4 * slots * h + 8 * x * plan.g * h,
        ),
        interpret=interpret,
        name="decode_step_read",
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
        cost_estimate=pl.CostEstimate(
            flops=2 * o.size, transcendentals=m.size, bytes_accessed=4 * (o.size + m.size + l.size)
        ),
        interpret=interpret,
        name="decode_step_join",
    )(o, m, l)
    shape = token.q.shape
    ring_k, ring_v = (a.reshape(cache.ring_k.shape) for a in after[:2])
    return out.reshape(shape), lse.reshape(shape[:2]), Cache(ring_k, ring_v, after[2], after[3])
