"""decode_step on GPU, in Pallas' Triton: items of all KV heads, and their join.

  programs of a KV head | 0 .. R - 1: 128 slots of the ring each | R ..: even shares of its pages |

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
from pallas_kernels.tuning import Blocks, Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

TILE = 64
"""Slots of a tile; of heads of 256 half of it: otherwise registers spill."""

RING = 128
"""Ring slots of a program."""

PROGRAMS, ITEMS = 528, 32
"""Programs of all KV heads, and items of one, at least: as in ``ragged_decode``."""

LEAST = (128, 512)
"""Slots of an item at least: where ITEMS is enough of them, and where it is not."""


JOINED = 1 << 14
"""Most numbers of a query's partials: the join holds them in registers."""


class StepSizes(NamedTuple):
    """Static sizes: KV heads, queries of a group, head dim, ring, page, pages of the pool, entries of a list;
    slots of a tile, items of ring and pages, tiles of an item at least; the scale of scores.

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


class Head(NamedTuple):
    """A program's KV head.

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


def _head(sizes: StepSizes, seen: Any, length: Any) -> Head:
    x = pl.program_id(1)
    n, held = seen[jax.lax.div(x, sizes.heads)], jnp.minimum(length[x], sizes.entries * sizes.size)
    return Head(x, pl.program_id(0), n, held, jax.lax.rem(jnp.maximum(n, 0), sizes.window))


def _queries(sizes: StepSizes, head: Head, q: Any) -> Array:
    """[ROWS, H]; rows beyond the group's are zeros."""
    row, at = _grid(jnp.arange(ROWS, dtype=jnp.int32)[:, None], jnp.arange(sizes.h, dtype=jnp.int32)[None])
    return compat.load(q.at[jnp.full(row.shape, head.x, jnp.int32), row, at], mask=row < sizes.g)


def _grown(sizes: StepSizes, q: Array, stats: tiles.Stats, k: Array, v: Array, see: Array) -> tiles.Stats:
    s = tiles.product_nt(q, k) * sizes.scale
    return tiles.grow(stats, s, see[None, :], lambda p: tiles.product_nn(p.astype(v.dtype), v))


def _pages(sizes: StepSizes, head: Head, q: Array, table: Any, pools: Any, stats: tiles.Stats) -> tiles.Stats:
    """The statistics after this program's share of the pages."""
    count = pl.cdiv(head.length, sizes.tile)
    share = jnp.maximum(pl.cdiv(count, sizes.items), sizes.least)
    begin = (head.item - sizes.ring) * share

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
        see = slot < head.length
        entry = jnp.full((sizes.tile,), head.x, jnp.int32), slot // sizes.size
        page = jnp.clip(compat.load(table.at[entry], mask=see), 0, sizes.pool - 1)
        at = _grid(page[:, None], (slot % sizes.size)[:, None], jnp.arange(sizes.h, dtype=jnp.int32)[None])
        mask = jnp.broadcast_to(see[:, None], at[0].shape)
        k, v = (compat.load(pool.at[at], mask=mask) for pool in pools)
        return _grown(sizes, q, stats, k, v, see)

    return jax.lax.fori_loop(begin, jnp.minimum(begin + share, count), step, stats)


def _ring(
    sizes: StepSizes, head: Head, q: Array, rings: Any, new: tuple[Array, ...], stats: tiles.Stats
) -> tiles.Stats:
    """The statistics after this program's slots of the ring, the new token in its own."""
    begin = head.item * sizes.ring_tiles

    def step(i: Array, stats: tiles.Stats) -> tiles.Stats:
        slot = i * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
        see = (slot <= head.seen) & (slot < sizes.window)
        at = _grid(slot[:, None], jnp.arange(sizes.h, dtype=jnp.int32)[None])
        is_new = (at[0] == head.at) & (head.seen >= 0)
        mask = jnp.broadcast_to(see[:, None], at[0].shape)
        where = jnp.full(at[0].shape, head.x, jnp.int32), *at
        k, v = (jnp.where(is_new, x[None], compat.load(r.at[where], mask=mask)) for r, x in zip(rings, new))
        return _grown(sizes, q, stats, k, v, see)

    end = jnp.minimum(begin + sizes.ring_tiles, pl.cdiv(sizes.window, sizes.tile))
    return jax.lax.fori_loop(begin, end, step, stats)


def _one(x: Array) -> Array:
    """[ROWS, H] with x in the first row."""
    first = jax.lax.broadcasted_iota(jnp.int32, (ROWS, x.shape[0]), 0) == 0
    return jnp.where(first, x[None], jnp.zeros((), x.dtype))


def _exchanged(
    sizes: StepSizes, head: Head, q: Array, lists: Any, after: Any, new: tuple[Array, ...], stats: Any
) -> tiles.Stats:
    """The statistics after the leaving token, which is now in its page, and the new one in its slot."""
    (table, enters), channel = lists, jnp.arange(sizes.h, dtype=jnp.int32)
    rings, pools, there = after[:2], after[2:], channel < sizes.h
    slot = jnp.full((sizes.h,), head.x, jnp.int32), jnp.full((sizes.h,), head.at, jnp.int32), channel
    old = [compat.load(ring.at[slot], mask=there) for ring in rings]
    entry = jax.lax.div(head.length, sizes.size)
    page = table[head.x, jnp.minimum(entry, sizes.entries - 1)]
    leaves = (enters[head.x] > 0) & (head.seen >= sizes.window) & (entry < sizes.entries)
    leaves &= (page >= 0) & (page < sizes.pool)
    to = (
        jnp.full((sizes.h,), jnp.clip(page, 0, sizes.pool - 1), jnp.int32),
        jnp.full((sizes.h,), jax.lax.rem(head.length, sizes.size), jnp.int32),
        channel,
    )
    if sizes.compiled:  # a line is loaded by several threads: none may store before all have
        compat.plt.debug_barrier()
    for ring, pool, x, fresh in zip(rings, pools, old, new):
        compat.store(pool.at[to], x, mask=there & leaves)
        compat.store(ring.at[slot], fresh, mask=there & (head.seen >= 0))
    k, v = (_one(jnp.where(leaves, x, jnp.zeros((), x.dtype))) for x in old)
    return _grown(sizes, q, stats, k, v, (jnp.arange(ROWS, dtype=jnp.int32) == 0) & leaves)


def _read(sizes: StepSizes) -> Callable[..., None]:
    """The kernel: the partial of one item."""

    def body(table: Any, seen: Any, length: Any, enters: Any, *refs: Any) -> None:
        q, *token = refs[:3]
        before, (o, m, l), after = refs[3:7], refs[7:10], refs[10:]
        head = _head(sizes, seen, length)
        queries, start = _queries(sizes, head, q), tiles.start(ROWS, sizes.h)

        def ring() -> tiles.Stats:
            channel = jnp.arange(sizes.h, dtype=jnp.int32)
            line = jnp.full((sizes.h,), head.x, jnp.int32), channel
            new = tuple(compat.load(x.at[line], mask=channel < sizes.h) for x in token)
            stats = _ring(sizes, head, queries, before[:2], new, start)

            def owner(stats: tiles.Stats) -> tiles.Stats:
                return _exchanged(sizes, head, queries, (table, enters), after, new, stats)

            owns = head.item == jax.lax.div(head.at, sizes.ring_tiles * sizes.tile)
            return jax.lax.cond(owns, owner, lambda stats: stats, stats)

        top, total, sums = jax.lax.cond(
            head.item < sizes.ring, ring, lambda: _pages(sizes, head, queries, table, before[2:], start)
        )
        row = jnp.arange(ROWS, dtype=jnp.int32)
        place = tuple(jnp.full((ROWS,), a, jnp.int32) for a in (head.x, head.item))
        compat.store(m.at[*place, row], top.reshape(ROWS), mask=row < sizes.g)
        compat.store(l.at[*place, row], total.reshape(ROWS), mask=row < sizes.g)
        at = _grid(row[:, None], jnp.arange(sizes.h, dtype=jnp.int32)[None])
        wide = tuple(jnp.full(at[0].shape, a, jnp.int32) for a in (head.x, head.item))
        compat.store(o.at[*wide, *at], sums, mask=at[0] < sizes.g)

    return body


def _join(sizes: StepSizes) -> Callable[..., None]:
    """The kernel: (partials of a KV head) -> (out, lse) of one query, in one order always."""
    most = pl.next_power_of_2(sizes.ring + sizes.items)

    def body(o: Any, m: Any, l: Any, out: Any, lse: Any) -> None:
        query, x = pl.program_id(0), pl.program_id(1)
        item, channel = jnp.arange(most, dtype=jnp.int32), jnp.arange(sizes.h, dtype=jnp.int32)
        there = item < sizes.ring + sizes.items
        at = jnp.full((most,), x, jnp.int32), item, jnp.full((most,), query, jnp.int32)
        denominators = compat.load(l.at[at], mask=there)
        top = compat.load(m.at[at], mask=there, other=tiles.HIDDEN)
        top = jnp.where(denominators != 0, top, tiles.HIDDEN)
        shift = jnp.max(top)
        shift = jnp.where(shift > tiles.HIDDEN, shift, 0.0)
        scale = jnp.where(denominators != 0, jnp.exp(top - shift), 0.0)
        total = jnp.sum(scale * denominators)
        rows, channels = _grid(item[:, None], channel[None])
        head_at, query_at = (jnp.full(rows.shape, a, jnp.int32) for a in (x, query))
        part = compat.load(o.at[head_at, rows, query_at, channels], mask=rows < sizes.ring + sizes.items)
        sums = jnp.sum(jnp.where(scale[:, None] != 0, scale[:, None] * part, 0.0), axis=0)
        safe = jnp.where(total != 0, total, 1.0)
        out[...] = jnp.where(total != 0, sums / safe, 0.0).astype(out.dtype)
        lse[0] = jnp.where(total != 0, shift + jnp.log(safe), -jnp.inf)

    return body


def _sizes(
    token: Token, cache: Cache, lists: Lists, scale: float, blocks: Tuned, compiled: bool
) -> StepSizes:
    if why := refusal("triton", token.q, cache, lists.table):
        raise Unsupported(why)
    (b, heads, window, h), (pool, size, _), m = cache.ring_k.shape, cache.k_pages.shape, lists.table.shape[2]
    items = -(-PROGRAMS // (b * heads))
    own = tuning.Blocks(k=TILE if h <= 128 else TILE // 2, item=LEAST[items < ITEMS], warps=4, stages=2)
    chosen = tuning.pick(blocks, "step", cache.k_pages.dtype, h, own)
    least, ring = max(1, chosen.item // chosen.k), -(-window // max(RING, chosen.k))
    items = min(max(items, ITEMS), -(-m * size // (least * chosen.k)), JOINED // h - ring)
    g, tile = token.q.shape[1] // heads, chosen.k
    return StepSizes(heads, g, h, window, size, pool, m, tile, ring, items, least, scale, compiled, chosen)


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "blocks"))
def decode_step(
    token: Token, cache: Cache, lists: Lists, *, scale: float, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Cache]:
    """See ``api.decode_step``."""
    sizes = _sizes(token, cache, lists, scale, blocks, interpret is False)
    (b, heads, window, h), anywhere = cache.ring_k.shape, pl.BlockSpec(memory_space=pl.ANY)
    x, items = b * heads, sizes.ring + sizes.items
    inputs = [lists.table.reshape(x, -1), lists.seen, lists.length.reshape(x), lists.enters.reshape(x)]
    inputs += [token.q.reshape(x, sizes.g, h), token.k.reshape(x, h), token.v.reshape(x, h)]
    state = [*(ring.reshape(x, window, h) for ring in cache[:2]), *cache[2:]]
    parts = [jax.ShapeDtypeStruct((x, items, sizes.g, *more), jnp.float32) for more in ((h,), (), ())]
    slots = x * (window + sizes.entries * sizes.size)
    o, m, l, *after = pl.pallas_call(
        _read(sizes),
        grid=(items, x),
        in_specs=[anywhere] * (len(inputs) + len(state)),
        out_specs=[anywhere] * (3 + len(state)),
        out_shape=[*parts, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in state)],
        input_output_aliases={len(inputs) + i: 3 + i for i in range(len(state))},
        compiler_params=compat.triton_params(warps=sizes.blocks.warps, stages=sizes.blocks.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * sizes.g * h,
            transcendentals=slots * sizes.g,
            bytes_accessed=4 * slots * h + 8 * x * sizes.g * h,
        ),
        interpret=interpret,
        name="decode_step_read",
    )(*inputs, *state)
    out, lse = pl.pallas_call(
        _join(sizes),
        grid=(sizes.g, x),
        in_specs=[anywhere] * 3,
        out_specs=[
            pl.BlockSpec((None, None, h), lambda r, i: (i, r, 0)),
            pl.BlockSpec((None, 1), lambda r, i: (i, r)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((x, sizes.g, h), token.q.dtype),
            jax.ShapeDtypeStruct((x, sizes.g), jnp.float32),
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
