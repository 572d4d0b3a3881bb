"""decode_step on TPU: a loop over the items of all KV heads; the next item's pages are on their way.

  a KV head's list | ring: whole pages, one copy | its pages, a copy each ...
  items            |<----------- item slots ----------->|<----------- ...

A ring shorter than a page has one for itself, whose end is dead.
No list is made before it: which item comes next is a few scalar operations on lengths in SMEM. A KV head's
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
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ITEM = 1024
"""Slots of an item."""


class StepSizes(NamedTuple):
    """Static sizes of a call.

    x lists; KV heads; g queries of a KV head; slots of a ring and of a page; pages of the pool; entries of a
    list; pages of an item; the scale of scores.
    """

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
        return -(-self.window // self.size)

    @property
    def base(self) -> int:
        """Where a list's own slots begin."""
        return self.ring * self.size

    @property
    def width(self) -> int:
        return self.per_item * self.size


class Item(NamedTuple):
    """An item: its list, its number there, the side of the buffers."""

    row: Array
    block: Array
    side: Array


class KvLists(NamedTuple):
    """The lists of all KV heads, in SMEM, flat; page ids are clipped to those of the pool."""

    sizes: StepSizes
    table: Any
    seen: Any
    length: Any
    enters: Any

    def position(self, item: Item) -> Array:
        """Position of the new token; below 0 without one."""
        return self.seen[jax.lax.div(item.row, jnp.int32(self.sizes.heads))]

    def page(self, at: Array) -> Array:
        return jnp.clip(self.table[at], 0, self.sizes.pool - 1)

    def end(self, item: Item) -> tuple[Array, Array]:
        """Where in the list the leaving token goes, and whether it does."""
        length, entries = self.length[item.row], jnp.int32(self.sizes.entries)
        entry = jax.lax.div(length, jnp.int32(self.sizes.size))
        at = self.table[item.row * entries + jnp.minimum(entry, entries - 1)]
        there = (entry < entries) & (at >= 0) & (at < self.sizes.pool)
        there = there & (self.position(item) >= self.sizes.window)
        return length, there & (self.enters[item.row] > 0)

    def live(self, item: Item) -> Array:
        """Paged slots after the step."""
        length, enters = self.end(item)
        return jnp.minimum(length + enters.astype(jnp.int32), self.sizes.entries * self.sizes.size)

    def pages(self, item: Item) -> Array:
        """Pages that are left, with the ring, from this item's first on."""
        paged = jax.lax.div(self.live(item) + (self.sizes.size - 1), jnp.int32(self.sizes.size))
        return self.sizes.ring + paged - item.block * self.sizes.per_item

    def after(self, item: Item) -> Item:
        last = self.pages(item) <= self.sizes.per_item
        row = item.row + last.astype(jnp.int32)
        return Item(row, jnp.where(last, 0, item.block + 1), 1 - item.side)


class Memory(NamedTuple):
    """Rings and pages in HBM, k and v; their buffers; semaphores of reads (a side each) and writes."""

    ring: tuple[Any, Any]
    pages: tuple[Any, Any]
    buffers: tuple[Any, Any]
    read: Any
    write: Any


def _read(kv: KvLists, memory: Memory, item: Item, act: str) -> None:
    """Start all copies of an item's pages, or wait for them."""
    sizes, sem = kv.sizes, memory.read.at[item.side]

    @pl.when(item.block == 0)
    def _() -> None:
        pages = pl.ds(item.row * sizes.ring, sizes.ring)
        for ring, buffer in zip(memory.ring, memory.buffers):
            near = buffer.at[item.side, pl.ds(0, sizes.ring), pl.ds(0, min(sizes.size, sizes.window))]
            getattr(pltpu.make_async_copy(ring.at[pages], near, sem), act)()

    place = item.row * sizes.entries + item.block * sizes.per_item - sizes.ring

    def page(p: Array, carry: Array) -> Array:
        at = kv.page(place + p)
        for pool, buffer in zip(memory.pages, memory.buffers):
            getattr(pltpu.make_async_copy(pool.at[at], buffer.at[item.side, p], sem), act)()
        return carry

    end = jnp.minimum(kv.pages(item), sizes.per_item)
    jax.lax.fori_loop(jnp.where(item.block == 0, sizes.ring, 0), end, page, jnp.int32(0))


def _bounds(kv: KvLists, item: Item) -> tuple[Array, Array]:
    """Live slots of the ring, and the end of live slots of the list, ring and all."""
    sizes = kv.sizes
    return jnp.clip(kv.position(item) + 1, 0, sizes.window), sizes.base + kv.live(item)


def _visible(kv: KvLists, item: Item) -> Any:
    """Which slots of an item are live, [1, Y]."""
    sizes, (ring, end) = kv.sizes, _bounds(kv, item)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.width), 1) + item.block * sizes.width
    return (at < ring) | ((at >= sizes.base) & (at < end))


def _clear(kv: KvLists, memory: Memory, item: Item) -> None:
    """Zeros for dead values of an item, since 0 * NaN is NaN."""
    sizes, (ring, end), v = kv.sizes, _bounds(kv, item), memory.buffers[1]
    start = item.block * sizes.width

    @pl.when(((item.block == 0) & (ring < sizes.base)) | (start + sizes.width > end))
    def _() -> None:
        def page(p: Array, carry: Array) -> Array:
            at = start + p * sizes.size + jax.lax.broadcasted_iota(jnp.int32, (sizes.size, sizes.h), 0)
            there = (at < ring) | ((at >= sizes.base) & (at < end))
            v[item.side, p] = jnp.where(there, v[item.side, p], jnp.zeros((), v.dtype))
            return carry

        jax.lax.fori_loop(0, sizes.per_item, page, jnp.int32(0))


class Slot(NamedTuple):
    """A slot of an item's buffers that is written: its page there and in a pool, and its place in it."""

    page: Array
    at: Array
    place: Array

    def _tile(self) -> Any:
        return pl.ds(pl.multiple_of(jax.lax.div(self.place, jnp.int32(ROWS)) * ROWS, ROWS), ROWS)

    def put(self, buffer: Any, side: Array, new: Float[Array, "1 H"]) -> Float[Array, "1 H"]:
        """Writes ``new`` and returns the old row, float32."""
        tile = buffer[side, self.page, self._tile(), :].astype(jnp.float32)
        is_slot = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) == (self.place & (ROWS - 1))
        buffer[side, self.page, self._tile(), :] = jnp.where(is_slot, new, tile).astype(buffer.dtype)
        return jnp.sum(jnp.where(is_slot, tile, 0.0), axis=0, keepdims=True)

    def copy(self, buffer: Any, side: Array, pool: Any, sem: Any) -> Any:
        """The copy of the rows around it to memory."""
        tile = self._tile()
        return pltpu.make_async_copy(buffer.at[side, self.page, tile], pool.at[self.at, tile], sem)


def _slots(kv: KvLists, item: Item) -> tuple[tuple[Array, Slot], tuple[Array, Slot]]:
    """Whether this item holds the slot of the new token, of the leaving one; and which these are."""
    sizes, position, (length, leaves) = kv.sizes, kv.position(item), kv.end(item)
    size, where = jnp.int32(sizes.size), jax.lax.rem(jnp.maximum(position, 0), jnp.int32(sizes.window))
    page = jax.lax.div(where, size)
    new = Slot(page, item.row * sizes.ring + page, jax.lax.rem(where, size))
    entry = jax.lax.div(length, size)
    page = sizes.ring + entry - item.block * sizes.per_item
    there = leaves & (page >= 0) & (page < sizes.per_item)
    at = kv.page(item.row * sizes.entries + jnp.minimum(entry, sizes.entries - 1))
    return ((item.block == 0) & (position >= 0), new), (there, Slot(page, at, jax.lax.rem(length, size)))


def _body(sizes: StepSizes) -> Callable[..., None]:
    """The kernel: (lists, token, rings, pools) -> (out, lse, the same memory)."""

    def body(table: Any, seen: Any, length: Any, enters: Any, *refs: Any) -> None:
        kv = KvLists(sizes, table, seen, length, enters)
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
            after = kv.after(item)
            pl.when(after.row < sizes.x)(lambda: _read(kv, memory, after, "start"))
            _read(kv, memory, item, "wait")
            _clear(kv, memory, item)
            (arrives, new), (leaves, left) = _slots(kv, item)
            pl.when(item.block == 0)(lambda: first(item, arrives, new))

            @pl.when(leaves)
            def _() -> None:
                for i, buffer in enumerate(memory.buffers):
                    left.put(buffer, item.side, old[i])
                    left.copy(buffer, item.side, memory.pages[i], write.at[1]).start()

            keys, values = (x[item.side].reshape(sizes.width, sizes.h) for x in memory.buffers)
            scores = tiles.product_nt(q[item.row], keys) * sizes.scale
            m[...], l[...], o[...] = tiles.grow(
                (m[...], l[...], o[...]),
                scores,
                _visible(kv, item),
                lambda p: tiles.product_nn(p.astype(values.dtype), values),
            )

            @pl.when(after.row > item.row)
            def _() -> None:
                result, lses = tiles.finish((m[...], l[...], o[...]))
                out[item.row] = result.astype(out.dtype)
                lse[item.row] = lses

            # What was written lies in buffers that the next item but one is copied to.
            for there, slot, pools, i in ((arrives, new, memory.ring, 0), (leaves, left, memory.pages, 1)):

                @pl.when(there)
                def _(slot: Slot = slot, pools: Any = pools, i: int = i) -> None:
                    for buffer, pool in zip(memory.buffers, pools):
                        slot.copy(buffer, item.side, pool, write.at[i]).wait()

            return after

        start = Item(jnp.int32(0), jnp.int32(0), jnp.int32(0))
        _read(kv, memory, start, "start")
        jax.lax.while_loop(lambda item: item.row < sizes.x, step, start)

    return body


def _sizes(token: Token, cache: Cache, lists: Lists, scale: float, blocks: Tuned) -> StepSizes:
    if why := refusal("mosaic_tpu", token.q, cache, lists.table):
        raise Unsupported(why)
    (b, heads, window, h), (pool, size, _), m = cache.ring_k.shape, cache.k_pages.shape, lists.table.shape[2]
    chosen = tuning.pick(blocks, "step", cache.k_pages.dtype, h, tuning.Blocks(item=ITEM))
    g = token.q.shape[1] // heads
    sizes = StepSizes(b * heads, heads, g, h, window, size, pool, m, 0, scale)
    return sizes._replace(per_item=min(max(chosen.item, sizes.base) // size, sizes.ring + m))


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "blocks"))
def decode_step(
    token: Token, cache: Cache, lists: Lists, *, scale: float, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Cache]:
    """See ``api.decode_step``."""
    sizes = _sizes(token, cache, lists, scale, blocks)
    x, g, h = sizes.x, sizes.g, sizes.h
    if interpret is False:
        compat.check_lanes("decode_step", h)
    rings = [ring.reshape(x * sizes.ring, -1, h) for ring in cache[:2]]
    pools = [*rings, *cache[2:]]
    if interpret is False:
        pools = [compat.in_hbm(pool) for pool in pools]
    smem, vmem, hbm = (pl.BlockSpec(memory_space=at) for at in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    scalars = [lists.table.reshape(-1), lists.seen, lists.length.reshape(-1)]
    scalars.append(lists.enters.reshape(-1).astype(jnp.int32))
    heads = [token.q.reshape(x, g, h), token.k.reshape(x, 1, h), token.v.reshape(x, 1, h)]
    operands = [*((a, smem) for a in scalars), *((a, vmem) for a in heads), *((a, hbm) for a in pools)]
    few = len(scalars) + len(heads)
    slots = x * (sizes.window + sizes.entries * sizes.size)
    out, lse, *after = pl.pallas_call(
        _body(sizes),
        in_specs=[spec for _, spec in operands],
        out_specs=[vmem, vmem, *[hbm] * len(pools)],
        out_shape=[
            jax.ShapeDtypeStruct((x, g, h), token.q.dtype),
            jax.ShapeDtypeStruct((x, g, LANES), jnp.float32),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pools),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((2, sizes.per_item, sizes.size, h), cache.k_pages.dtype)] * 2,
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
    out, lse = out.reshape(token.q.shape), lse[..., 0].reshape(token.q.shape[:2])
    return out, lse, Cache(ring_k, ring_v, after[2], after[3])
