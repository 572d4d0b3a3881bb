"""decode_step on TPU: a loop over the items of all streams, the next one's pages on their way.

  a stream's list  | ring: whole pages, one copy | its pages, a copy each ...
  items            |<----------- item slots ----------->|<----------- ...

A ring shorter than a page has one for itself, whose end is dead.
There is no plan before it: which item comes next is a few scalar operations on lengths in SMEM. A stream's
first item takes the leaving token out of its slot of the ring and puts the new one there; the item with the
end of the list puts the leaving one there. Both are put into the buffers, where they are read, and 16 rows
around them go to memory: what a copy can write of bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.decode_step.call import LANES, ROWS, Cache, Lists, Token, refusal
from pallas_kernels.dispatch import Unsupported

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from pallas_kernels.tuning import Tuned

ITEM = 1024
"""Slots of an item."""


class Plan(NamedTuple):
    """Streams, KV heads, queries of a group, head dim, ring, slots of a page, pages of the pool, entries of a
    list, pages of an item; and what scores are multiplied with."""

    x: int
    heads: int
    g: int
    h: int
    window: int
    size: int
    pool: int
    entries: int
    per_item: int
    scale: float

    @property
    def ring(self) -> int:
        """Pages of a ring."""
        return -(-self.window // self.size)

    @property
    def base(self) -> int:
        """Where a list's own slots begin."""
        return self.ring * self.size

    @property
    def width(self) -> int:
        """Slots of an item."""
        return self.per_item * self.size


class Item(NamedTuple):
    """Its stream, its place in the stream's list, the side of the buffers."""

    row: Array
    block: Array
    side: Array


class Streams(NamedTuple):
    """What each stream reads and writes, in SMEM, flat; a page is one of the pool, whatever a table says."""

    plan: Plan
    table: Any
    seen: Any
    length: Any
    enters: Any

    def position(self, item: Item) -> Array:
        """Of the new token; below 0 without one."""
        return self.seen[jax.lax.div(item.row, jnp.int32(self.plan.heads))]

    def page(self, at: Array) -> Array:
        """An entry of the table."""
        return jnp.clip(self.table[at], 0, self.plan.pool - 1)

    def end(self, item: Item) -> tuple[Array, Array]:
        """Where the leaving token goes in the stream's list, and whether it does."""
        length, entries = self.length[item.row], jnp.int32(self.plan.entries)
        entry = jax.lax.div(length, jnp.int32(self.plan.size))
        at = self.table[item.row * entries + jnp.minimum(entry, entries - 1)]
        there = (entry < entries) & (at >= 0) & (at < self.plan.pool)
        there = there & (self.position(item) >= self.plan.window)
        return length, there & (self.enters[item.row] > 0)

    def live(self, item: Item) -> Array:
        """Paged slots after the step."""
        length, enters = self.end(item)
        return jnp.minimum(length + enters.astype(jnp.int32), self.plan.entries * self.plan.size)

    def pages(self, item: Item) -> Array:
        """Pages of the stream that are left, ring and all, this item's first."""
        paged = jax.lax.div(self.live(item) + (self.plan.size - 1), jnp.int32(self.plan.size))
        return self.plan.ring + paged - item.block * self.plan.per_item

    def after(self, item: Item) -> Item:
        """The next item."""
        last = self.pages(item) <= self.plan.per_item
        row = item.row + last.astype(jnp.int32)
        return Item(row, jnp.where(last, 0, item.block + 1), 1 - item.side)


class Memory(NamedTuple):
    """Rings and pages in HBM, k and v; their buffers; semaphores of reads (a side each) and writes."""

    ring: tuple[Any, Any]
    pages: tuple[Any, Any]
    buffers: tuple[Any, Any]
    read: Any
    write: Any


def _read(streams: Streams, memory: Memory, item: Item, act: str) -> None:
    """Start all copies of an item's pages, or wait for them."""
    plan, sem = streams.plan, memory.read.at[item.side]

    @pl.when(item.block == 0)
    def _() -> None:
        mine = pl.ds(item.row * plan.ring, plan.ring)
        for ring, buffer in zip(memory.ring, memory.buffers):
            near = buffer.at[item.side, pl.ds(0, plan.ring), pl.ds(0, min(plan.size, plan.window))]
            getattr(pltpu.make_async_copy(ring.at[mine], near, sem), act)()

    place = item.row * plan.entries + item.block * plan.per_item - plan.ring

    def page(p: Array, carry: Array) -> Array:
        at = streams.page(place + p)
        for pool, buffer in zip(memory.pages, memory.buffers):
            getattr(pltpu.make_async_copy(pool.at[at], buffer.at[item.side, p], sem), act)()
        return carry

    end = jnp.minimum(streams.pages(item), plan.per_item)
    jax.lax.fori_loop(jnp.where(item.block == 0, plan.ring, 0), end, page, jnp.int32(0))


def _bounds(streams: Streams, item: Item) -> tuple[Array, Array]:
    """Live slots of the ring, and the end of live slots of the list, ring and all."""
    plan = streams.plan
    return jnp.clip(streams.position(item) + 1, 0, plan.window), plan.base + streams.live(item)


def _visible(streams: Streams, item: Item) -> Any:
    """Which slots of an item are live, [1, Y]."""
    plan, (ring, end) = streams.plan, _bounds(streams, item)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, plan.width), 1) + item.block * plan.width
    return (at < ring) | ((at >= plan.base) & (at < end))


def _clear(streams: Streams, memory: Memory, item: Item) -> None:
    """Zeros for dead values of an item, since 0 * NaN is NaN."""
    plan, (ring, end), v = streams.plan, _bounds(streams, item), memory.buffers[1]
    start = item.block * plan.width

    @pl.when(((item.block == 0) & (ring < plan.base)) | (start + plan.width > end))
    def _() -> None:
        def page(p: Array, carry: Array) -> Array:
            at = start + p * plan.size + jax.lax.broadcasted_iota(jnp.int32, (plan.size, plan.h), 0)
            there = (at < ring) | ((at >= plan.base) & (at < end))
            v[item.side, p] = jnp.where(there, v[item.side, p], jnp.zeros((), v.dtype))
            return carry

        jax.lax.fori_loop(0, plan.per_item, page, jnp.int32(0))


class Slot(NamedTuple):
    """A slot of an item's buffers that is written: its page there and in a pool, and its place in it."""

    page: Array
    at: Array
    place: Array

    def _tile(self) -> Any:
        return pl.ds(pl.multiple_of(jax.lax.div(self.place, jnp.int32(ROWS)) * ROWS, ROWS), ROWS)

    def put(self, buffer: Any, side: Array, new: Float[Array, "1 H"]) -> Float[Array, "1 H"]:
        """What was there, float32; ``new`` is there after."""
        tile = buffer[side, self.page, self._tile(), :].astype(jnp.float32)
        mine = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) == (self.place & (ROWS - 1))
        buffer[side, self.page, self._tile(), :] = jnp.where(mine, new, tile).astype(buffer.dtype)
        return jnp.sum(jnp.where(mine, tile, 0.0), axis=0, keepdims=True)

    def copy(self, buffer: Any, side: Array, pool: Any, sem: Any) -> Any:
        """Of the rows around it, to memory."""
        tile = self._tile()
        return pltpu.make_async_copy(buffer.at[side, self.page, tile], pool.at[self.at, tile], sem)


def _slots(streams: Streams, item: Item) -> tuple[tuple[Array, Slot], tuple[Array, Slot]]:
    """Whether this item holds the slot of the new token, of the leaving one; and which these are."""
    plan, position, (length, leaves) = streams.plan, streams.position(item), streams.end(item)
    size, where = jnp.int32(plan.size), jax.lax.rem(jnp.maximum(position, 0), jnp.int32(plan.window))
    page = jax.lax.div(where, size)
    new = Slot(page, item.row * plan.ring + page, jax.lax.rem(where, size))
    entry = jax.lax.div(length, size)
    page = plan.ring + entry - item.block * plan.per_item
    there = leaves & (page >= 0) & (page < plan.per_item)
    at = streams.page(item.row * plan.entries + jnp.minimum(entry, plan.entries - 1))
    return ((item.block == 0) & (position >= 0), new), (there, Slot(page, at, jax.lax.rem(length, size)))


def _body(plan: Plan) -> Callable[..., None]:
    """The kernel: (lists, token, rings, pools) -> (out, lse, the same memory)."""

    def body(table: Any, seen: Any, length: Any, enters: Any, *refs: Any) -> None:
        streams = Streams(plan, table, seen, length, enters)
        q, k, v, _, _, _, _, out, lse, *cache = refs[:13]
        kb, vb, old, m, l, o, read, write = refs[13:]
        memory = Memory((cache[0], cache[1]), (cache[2], cache[3]), (kb, vb), read, write)

        def first(item: Item, holds: Array, slot: Slot) -> None:
            m[...] = jnp.full_like(m, tiles.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)

            @pl.when(holds)
            def _() -> None:
                for i, (buffer, new) in enumerate(zip(memory.buffers, (k, v))):
                    old[i] = slot.put(buffer, item.side, new[item.row].astype(jnp.float32))
                    slot.copy(buffer, item.side, memory.ring[i], write.at[0]).start()

        def step(item: Item) -> Item:
            after = streams.after(item)
            pl.when(after.row < plan.x)(lambda: _read(streams, memory, after, "start"))
            _read(streams, memory, item, "wait")
            _clear(streams, memory, item)
            (arrives, new), (leaves, door) = _slots(streams, item)
            pl.when(item.block == 0)(lambda: first(item, arrives, new))

            @pl.when(leaves)
            def _() -> None:
                for i, buffer in enumerate(memory.buffers):
                    door.put(buffer, item.side, old[i])
                    door.copy(buffer, item.side, memory.pages[i], write.at[1]).start()

            keys, values = (x[item.side].reshape(plan.width, plan.h) for x in memory.buffers)
            scores = tiles.product_nt(q[item.row], keys) * plan.scale
            m[...], l[...], o[...] = tiles.grow(
                (m[...], l[...], o[...]),
                scores,
                _visible(streams, item),
                lambda p: tiles.product_nn(p.astype(values.dtype), values),
            )

            @pl.when(after.row > item.row)
            def _() -> None:
                found, lses = tiles.finish((m[...], l[...], o[...]))
                out[item.row] = found.astype(out.dtype)
                lse[item.row] = lses

            # What was written lies in buffers that the next item but one is copied to.
            for there, slot, pools, i in ((arrives, new, memory.ring, 0), (leaves, door, memory.pages, 1)):

                @pl.when(there)
                def _(slot: Slot = slot, pools: Any = pools, i: int = i) -> None:
                    for buffer, pool in zip(memory.buffers, pools):
                        slot.copy(buffer, item.side, pool, write.at[i]).wait()

            return after

        start = Item(jnp.int32(0), jnp.int32(0), jnp.int32(0))
        _read(streams, memory, start, "start")
        jax.lax.while_loop(lambda item: item.row < plan.x, step, start)

    return body


def _plan(token: Token, cache: Cache, lists: Lists, scale: float, blocks: Tuned) -> Plan:
    if why := refusal("mosaic_tpu", token.q, cache, lists.table):
        raise Unsupported(why)
    (b, heads, window, h), (pool, size, _), entries = (
        cache.ring_k.shape,
        cache.k_pages.shape,
        lists.table.shape[2],
    )
    found = tuning.pick(blocks, "step", cache.k_pages.dtype, h, tuning.Blocks(item=ITEM))
    g = token.q.shape[1] // heads
    plan = Plan(b * heads, heads, g, h, window, size, pool, entries, 0, scale)
    return plan._replace(per_item=min(max(found.item, plan.base) // size, plan.ring + entries))


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "blocks"))
def decode_step(
    token: Token, cache: Cache, lists: Lists, *, scale: float, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Cache]:
    """See ``api.decode_step``."""
    plan = _plan(token, cache, lists, scale, blocks)
    x, g, h = plan.x, plan.g, plan.h
    rings = [ring.reshape(x * plan.ring, -1, h) for ring in cache[:2]]
    pools = [*rings, *cache[2:]]
    if interpret is False:
        pools = [compat.in_hbm(pool) for pool in pools]
    smem, vmem, hbm = (pl.BlockSpec(memory_space=at) for at in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    scalars = [lists.table.reshape(-1), lists.seen, lists.length.reshape(-1)]
    scalars.append(lists.enters.reshape(-1).astype(jnp.int32))
    heads = [token.q.reshape(x, g, h), token.k.reshape(x, 1, h), token.v.reshape(x, 1, h)]
    operands = [*((a, smem) for a in scalars), *((a, vmem) for a in heads), *((a, hbm) for a in pools)]
    few = len(scalars) + len(heads)
    slots = x * (plan.window + plan.entries * plan.size)
    found, lse, *after = pl.pallas_call(
        _body(plan),
        in_specs=[spec for _, spec in operands],
        out_specs=[vmem, vmem, *[hbm] * len(pools)],
        out_shape=[
            jax.ShapeDtypeStruct((x, g, h), token.q.dtype),
            jax.ShapeDtypeStruct((x, g, LANES), jnp.float32),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pools),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((2, plan.per_item, plan.size, h), cache.k_pages.dtype)] * 2,
            pltpu.VMEM((2, 1, h), jnp.float32),
            *[pltpu.VMEM((g, n), jnp.float32) for n in (LANES, LANES, h)],
            *[pltpu.SemaphoreType.DMA((2,))] * 2,
        ],
        input_output_aliases={few + i: 2 + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=compat.VMEM_LIMIT, disable_bounds_checks=True, has_side_effects=False
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * g * h, transcendentals=slots * g, bytes_accessed=4 * slots * h + 8 * x * g * h
        ),
        interpret=interpret,
        name="decode_step",
    )(*(a for a, _ in operands))
    ring_k, ring_v = (ring.reshape(cache.ring_k.shape) for ring in after[:2])
    return (
        found.reshape(token.q.shape),
        lse[..., 0].reshape(token.q.shape[:2]),
        Cache(ring_k, ring_v, after[2], after[3]),
    )
