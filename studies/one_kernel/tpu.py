"""The step as one kernel on TPU: a loop over the items of all streams, the next one's pages on their way.

  a stream's list  | ring: W / S pages, one copy | its pages, a copy each ...
  items            |<----------- ITEM slots ----------->|<----------- ...

There is no plan before it: which item comes next is a few scalar operations on lengths in SMEM. A stream's
first item turns the queries and the key, takes the leaving token out of its slot of the ring, absorbs it
into φ, and puts the new token there; the item with the end of the list puts the leaving one there. Both are
put into the buffers, where they are read, and 16 rows around them go to memory: what a copy can write of
bfloat16. φ's features are one more tile of scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tiles
from pallas_kernels.phi.api import Summary
from studies.one_kernel.arrays import Cache, Token, turned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ITEM = 1024
LANES = 128
ROWS = 16
"""Rows of a tile of bfloat16."""


class Plan(NamedTuple):
    """Streams, KV heads, queries of a group, head dim, ring, slots of a page, entries, pages of an item."""

    x: int
    heads: int
    g: int
    h: int
    window: int
    size: int
    entries: int
    per_item: int

    @property
    def ring(self) -> int:
        """Pages of a ring."""
        return self.window // self.size

    @property
    def width(self) -> int:
        """Slots of an item."""
        return self.per_item * self.size


class Item(NamedTuple):
    """Its stream, its place in the stream's list, the side of the buffers."""

    row: Array
    block: Array
    side: Array


class Lists(NamedTuple):
    """What each stream reads and writes, in SMEM, flat; -1 for a row without a token."""

    plan: Plan
    table: Any
    seen: Any
    length: Any
    admit: Any

    def position(self, item: Item) -> Array:
        """Of the row's new token."""
        return self.seen[jax.lax.div(item.row, jnp.int32(self.plan.heads))]

    def live(self, item: Item) -> Array:
        """Paged slots after the step."""
        return self.length[item.row] + self.admit[item.row]

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


class Features(NamedTuple):
    """φ: rows in VMEM, before and after; values [X, F, H] in HBM with two buffers."""

    absorb: Any
    log_q: Any
    log_k: Any
    before: tuple[Any, Any]
    shift: Any
    weight: Any
    values: Any
    buffer: Any
    sem: Any

    def copy(self, row: Array, *, back: bool = False) -> Any:
        """Of a stream's values."""
        side = jax.lax.rem(row, jnp.int32(2))
        far, near = self.values.at[row], self.buffer.at[side]
        return pltpu.make_async_copy(near if back else far, far if back else near, self.sem.at[side])


def _read(lists: Lists, memory: Memory, item: Item, act: str) -> None:
    """Start all copies of an item's pages, or wait for them."""
    plan, sem = lists.plan, memory.read.at[item.side]

    @pl.when(item.block == 0)
    def _() -> None:
        mine, first = pl.ds(item.row * plan.ring, plan.ring), pl.ds(0, plan.ring)
        for ring, buffer in zip(memory.ring, memory.buffers):
            getattr(pltpu.make_async_copy(ring.at[mine], buffer.at[item.side, first], sem), act)()

    place = item.row * plan.entries + item.block * plan.per_item - plan.ring

    def page(p: Array, carry: Array) -> Array:
        at = lists.table[place + p]
        for pool, buffer in zip(memory.pages, memory.buffers):
            getattr(pltpu.make_async_copy(pool.at[at], buffer.at[item.side, p], sem), act)()
        return carry

    end = jnp.minimum(lists.pages(item), plan.per_item)
    jax.lax.fori_loop(jnp.where(item.block == 0, plan.ring, 0), end, page, jnp.int32(0))


def _bounds(lists: Lists, item: Item) -> tuple[Array, Array]:
    """Live slots of the ring, and the end of live slots of the list, ring and all."""
    window = lists.plan.window
    return jnp.clip(lists.position(item) + 1, 0, window), window + lists.live(item)


def _visible(lists: Lists, item: Item) -> Any:
    """Which slots of an item are live, [1, Y]."""
    plan, (ring, end) = lists.plan, _bounds(lists, item)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, plan.width), 1) + item.block * plan.width
    return (at < ring) | ((at >= plan.window) & (at < end))


def _clear(lists: Lists, memory: Memory, item: Item) -> None:
    """Zeros for dead values of an item, since 0 * NaN is NaN."""
    plan, (ring, end), v = lists.plan, _bounds(lists, item), memory.buffers[1]
    start = item.block * plan.width

    @pl.when(((item.block == 0) & (ring < plan.window)) | (start + plan.width > end))
    def _() -> None:
        def page(p: Array, carry: Array) -> Array:
            at = start + p * plan.size + jax.lax.broadcasted_iota(jnp.int32, (plan.size, plan.h), 0)
            there = (at < ring) | ((at >= plan.window) & (at < end))
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


def _slots(lists: Lists, item: Item) -> tuple[tuple[Array, Slot], tuple[Array, Slot]]:
    """Whether this item holds the slot of the new token, of the leaving one; and which these are."""
    plan, position, length = lists.plan, lists.position(item), lists.length[item.row]
    size, where = jnp.int32(plan.size), jax.lax.rem(jnp.maximum(position, 0), jnp.int32(plan.window))
    page = jax.lax.div(where, size)
    new = Slot(page, item.row * plan.ring + page, jax.lax.rem(where, size))
    entry = jax.lax.div(length, size)
    page = plan.ring + entry - item.block * plan.per_item
    there = (lists.admit[item.row] > 0) & (page >= 0) & (page < plan.per_item)
    at = lists.table[item.row * plan.entries + jnp.minimum(entry, plan.entries - 1)]
    return ((item.block == 0) & (position >= 0), new), (there, Slot(page, at, jax.lax.rem(length, size)))


def _absorb(features: Features, row: Array, v: Float[Array, "1 H"]) -> None:
    """The leaving token into φ."""

    def outer(column: Array, line: Array) -> Array:
        exact = jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(column, line, (((0,), (0,)), ((), ())), precision=exact)

    (shift, weight), values = features.before, features.buffer.at[jax.lax.rem(row, jnp.int32(2))]
    top = jnp.maximum(shift[row], features.log_k[row])
    finite = jnp.where(top == -jnp.inf, 0.0, top)
    keep, more = jnp.exp(shift[row] - finite), jnp.exp(features.log_k[row] - finite)
    features.shift[row] = top
    features.weight[row] = keep * weight[row] + more
    values[...] = outer(keep, jnp.ones_like(v)) * values[...] + outer(more, v)


def _completed(features: Features, row: Array, stats: tiles.Stats) -> tiles.Stats:
    """The statistics after φ."""
    weight, values = features.weight[row], features.buffer[jax.lax.rem(row, jnp.int32(2))]
    u = jnp.where(weight != 0, weight, 1.0)
    scores = features.log_q[row] + jnp.where(weight != 0, features.shift[row], 0.0) + jnp.log(u)
    see = (weight != 0) & ~(scores <= tiles.HIDDEN)
    return tiles.grow(stats, scores, see, lambda p: tiles.product_nn(p / u, values))


def _body(plan: Plan, completes: bool) -> Callable[..., None]:
    """The kernel: (lists, token, rings, pools, φ?) -> (out, lse, the same memory, φ?)."""

    def body(table: Any, seen: Any, length: Any, admit: Any, *refs: Any) -> None:
        lists = Lists(plan, table, seen, length, admit)
        q, k, v, cos, sin, *token = refs[: 5 + 3 * completes]
        before, refs = refs[9 + 3 * completes :][:2], refs[9 + 6 * completes :]
        out, lse, *cache = refs[: 6 + 3 * completes]
        kb, vb, qs, old, m, l, o, read, write, *more = refs[6 + 3 * completes :]
        memory = Memory((cache[0], cache[1]), (cache[2], cache[3]), (kb, vb), read, write)
        features = Features(*[*token, before, *cache[4:], *more]) if completes else None

        def begin(item: Item) -> None:
            _read(lists, memory, item, "start")
            if features is not None:
                pl.when(item.block == 0)(lambda: features.copy(item.row).start())

        def first(item: Item, holds: Array, slot: Slot) -> None:
            b = jax.lax.div(item.row, jnp.int32(plan.heads))
            m[...] = jnp.full_like(m, tiles.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)
            qs[...] = turned(q[item.row], cos[b], sin[b]).astype(qs.dtype)

            @pl.when(holds)
            def _() -> None:
                key = turned(k[item.row], cos[b], sin[b]).astype(kb.dtype).astype(jnp.float32)
                new = key, v[item.row].astype(jnp.float32)
                for i, buffer in enumerate(memory.buffers):
                    old[i] = slot.put(buffer, item.side, new[i])
                    slot.copy(buffer, item.side, memory.ring[i], write.at[0]).start()

            if features is not None:
                features.shift[item.row], features.weight[item.row] = (x[item.row] for x in features.before)
                features.copy(item.row).wait()

                @pl.when(features.absorb[item.row] > 0)
                def _() -> None:
                    _absorb(features, item.row, old[1])
                    features.copy(item.row, back=True).start()

        def step(item: Item) -> Item:
            after = lists.after(item)
            pl.when(after.row < plan.x)(lambda: begin(after))
            _read(lists, memory, item, "wait")
            _clear(lists, memory, item)
            (enters, new), (leaves, door) = _slots(lists, item)
            pl.when(item.block == 0)(lambda: first(item, enters, new))

            @pl.when(leaves)
            def _() -> None:
                for i, buffer in enumerate(memory.buffers):
                    door.put(buffer, item.side, old[i])
                    door.copy(buffer, item.side, memory.pages[i], write.at[1]).start()

            keys, values = (x[item.side].reshape(plan.width, plan.h) for x in memory.buffers)
            scores = tiles.product_nt(qs[...], keys) * plan.h**-0.5
            m[...], l[...], o[...] = tiles.grow(
                (m[...], l[...], o[...]),
                scores,
                _visible(lists, item),
                lambda p: tiles.product_nn(p.astype(values.dtype), values),
            )

            @pl.when(after.row > item.row)
            def _() -> None:
                stats = (m[...], l[...], o[...])
                if features is not None:
                    stats = _completed(features, item.row, stats)
                found, lses = tiles.finish(stats)
                out[item.row] = found.astype(out.dtype)
                lse[item.row] = lses

            # What was written lies in buffers that the next item but one is copied to.
            for there, slot, pools, i in ((enters, new, memory.ring, 0), (leaves, door, memory.pages, 1)):

                @pl.when(there)
                def _(slot: Slot = slot, pools: Any = pools, i: int = i) -> None:
                    for buffer, pool in zip(memory.buffers, pools):
                        slot.copy(buffer, item.side, pool, write.at[i]).wait()

            if features is not None:

                @pl.when((item.block == 0) & (features.absorb[item.row] > 0))
                def _() -> None:
                    features.copy(item.row, back=True).wait()

            return after

        start = Item(jnp.int32(0), jnp.int32(0), jnp.int32(0))
        begin(start)
        jax.lax.while_loop(lambda item: item.row < plan.x, step, start)

    return body


def _plan(cache: Cache, token: Token) -> Plan:
    (b, heads, window, h), size = cache.ring_k.shape, cache.k_pages.shape[1]
    if window % size or window > ITEM or h % LANES or size % ROWS:
        raise ValueError(f"a ring of {window} slots, pages of {size}, heads of {h}: not in this prototype")
    entries = token.table.shape[2]
    per_item = min(ITEM // size, window // size + entries)
    return Plan(b * heads, heads, token.q.shape[1] // heads, h, window, size, entries, per_item)


@functools.partial(jax.jit, static_argnames="interpret", donate_argnums=0)
def step(cache: Cache, token: Token, *, interpret: Any = False) -> tuple[Array, Array, Cache]:
    """As ``today.step``."""
    plan, summary = _plan(cache, token), cache.summary
    x, g, h = plan.x, plan.g, plan.h
    rings = [ring.reshape(x * plan.ring, plan.size, h) for ring in (cache.ring_k, cache.ring_v)]
    pools = [*rings, cache.k_pages, cache.v_pages]
    if interpret is False:
        pools = [compat.in_hbm(pool) for pool in pools]
    smem, vmem, hbm = (pl.BlockSpec(memory_space=at) for at in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    scalars = [token.table.reshape(-1), token.seen, token.length.reshape(-1)]
    scalars.append(token.admit.reshape(-1).astype(jnp.int32))
    heads = [token.q.reshape(x, g, h), token.k.reshape(x, 1, h), token.v.reshape(x, 1, h)]
    lines = [*heads, token.cos[:, None], token.sin[:, None]]
    inputs = [(a, smem) for a in scalars] + [(a, vmem) for a in lines]
    state = [(pool, hbm) for pool in pools]
    scratch = [
        *[pltpu.VMEM((2, plan.per_item, plan.size, h), jnp.bfloat16)] * 2,
        pltpu.VMEM((g, h), jnp.bfloat16),
        pltpu.VMEM((2, 1, h), jnp.float32),
        *[pltpu.VMEM((g, n), jnp.float32) for n in (LANES, LANES, h)],
        *[pltpu.SemaphoreType.DMA((2,))] * 2,
    ]
    if summary is not None:
        f = summary.weight.shape[-1]
        inputs += [(token.absorb.reshape(-1).astype(jnp.int32), smem)]
        inputs += [(token.log_q.reshape(x, g, f), vmem), (token.log_k.reshape(x, 1, f), vmem)]
        state += [(a.reshape(x, 1, f), vmem) for a in (summary.shift, summary.weight)]
        state += [(summary.values.reshape(x, f, h), hbm)]
        scratch += [pltpu.VMEM((2, f, h), jnp.float32), pltpu.SemaphoreType.DMA((2,))]
    outs = [jax.ShapeDtypeStruct((x, g, h), token.q.dtype), jax.ShapeDtypeStruct((x, g, LANES), jnp.float32)]
    operands = inputs + state
    slots = x * (plan.window + plan.entries * plan.size)
    found, lse, *after = pl.pallas_call(
        _body(plan, summary is not None),
        in_specs=[spec for _, spec in operands],
        out_specs=[vmem, vmem, *(spec for _, spec in state)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a, _ in state)],
        scratch_shapes=scratch,
        input_output_aliases={len(inputs) + i: 2 + i for i in range(len(state))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=compat.VMEM_LIMIT, disable_bounds_checks=True, has_side_effects=False
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * g * h, transcendentals=slots * g, bytes_accessed=4 * slots * h
        ),
        interpret=interpret,
        name="ragged_decode_step",
    )(*(a for a, _ in operands))
    shape = token.q.shape
    if summary is not None:
        shift, weight, values = (a.reshape(b.shape) for a, b in zip(after[4:], summary))
        summary = Summary(shift, weight, values)
    ring_k, ring_v = (ring.reshape(cache.ring_k.shape) for ring in after[:2])
    written = Cache(ring_k, ring_v, after[2], after[3], summary)
    return found.reshape(shape), lse[..., 0].reshape(shape[:2]), written
