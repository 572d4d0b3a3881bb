"""ragged_decode on GPU: one program an item of the work list, partials of a row's items joined after.

A program walks its pages a few at a time, so that a tile has 16 to 128 slots whatever a page has.
Dead slots are not loaded at all. Queries are padded to 16 rows and to a power of two of channels
(Triton's tiles); the pools are not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, softmax, tiles, tuning
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.ragged_decode import worklist
from pallas_kernels.ragged_decode.worklist import Plan

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from pallas_kernels.ragged_decode.call import Lists, Options, Pools
    from pallas_kernels.tuning import Tuned

TILE = 64
"""Slots of a tile, or those of one page if it has more."""

ROWS = 64
ITEM_SLOTS = (1024, 128)
"""Slots of an item: at most, and at least."""

PROGRAMS = 512
"""Items are made smaller until there are this many (about four a multiprocessor)."""


def _plan(q: Array, pools: Pools, lists: Lists, blocks: Tuned, *rest: Any) -> Plan:
    (b, n, t, h), size, (_, heads, m) = q.shape, pools.k.shape[1], lists.table.shape
    if size & (size - 1):
        raise Unsupported(
            f"ragged_decode(impl='triton'): pages of {size} slots; Triton's tiles are powers of two. Use "
            "pages of a power of two, or impl='xla'."
        )
    if pools.k.size >= 1 << 31:
        raise Unsupported(
            f"ragged_decode(impl='triton'): a pool of {pools.k.size} elements; Triton's offsets have 31 "
            "bits. Use a pool a layer, or impl='xla'."
        )
    total, j = n // heads * t, m if lists.pages is None else lists.pages.shape[2]
    rows = max(16, min(ROWS, pl.next_power_of_2(total)))
    few, exact = rows <= 16, pools.k.dtype.itemsize == 4
    # Otherwise registers spill: 64 queries' mass at 4 warps, float32 tiles of two stages.
    own = tuning.Blocks(k=TILE, item=ITEM_SLOTS[0], warps=8 if exact or not few else 4, stages=2 - exact)
    found = tuning.pick(blocks, "read" if few else "chunk", pools.k.dtype, h, own)
    per, many = found.item, -(-total // rows)
    while per > ITEM_SLOTS[1] and b * heads * many * -(-j * size // per) < PROGRAMS:
        per //= 2
    tile, wide = max(1, found.k // size), pl.next_power_of_2(h)
    per_item = max(tile, per // size // tile * tile)
    return Plan(n // heads, t, rows, many, per_item, tile, size, h, wide, found, *rest)


class Tile(NamedTuple):
    """A few pages of an item: their ids and live slots [tile], 0 for pages not held."""

    ids: Any
    live: Any
    first: Any


def _tile(plan: Plan, entry: Any, place: Array, held: Array, it: Array) -> Tile:
    at = it * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32)
    found = compat.load(entry.at[place + at], mask=at < held)
    shift = worklist.shift(plan.slots)
    return Tile(found >> shift, found & ((1 << shift) - 1), it * plan.tile)


def _live(plan: Plan, tile: Tile) -> Bool[Array, "C S"]:
    slot = jax.lax.broadcasted_iota(jnp.int32, (plan.tile, plan.slots), 1)
    return slot < tile.live[:, None]


def _pages(plan: Plan, pool: Any, scales: Any, which: int, tile: Tile, dtype: Any) -> Float[Array, "Y H"]:
    """The live slots of a tile's pages, one after another; zeros for dead ones. int8 is scaled."""
    shape = (plan.tile, plan.slots, plan.wide)
    page = jnp.broadcast_to(tile.ids[:, None, None], shape)
    slot, channel = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    there = (slot < tile.live[:, None, None]) & (channel < plan.h)
    x = compat.load(pool.at[page, slot, channel], mask=there)
    if scales is not None:
        flat = (plan.tile, plan.wide)
        page, channel = (
            jnp.broadcast_to(tile.ids[:, None], flat),
            jax.lax.broadcasted_iota(jnp.int32, flat, 1),
        )
        there = (tile.live[:, None] > 0) & (channel < plan.h)
        scale = compat.load(scales.at[page, jnp.full(flat, which, jnp.int32), channel], mask=there)
        x = x.astype(jnp.float32) * scale[:, None, :]
    return x.astype(dtype).reshape(plan.tile * plan.slots, plan.wide)


def _scores(
    plan: Plan, q: Array, k: Any, scales: Any, chosen: Any, tile: Tile
) -> tuple[Float[Array, "R Y"], Bool[Array, "1 Y"]]:
    """Capped scores of a tile, and which of its slots are read."""
    width = plan.tile * plan.slots
    s = tiles.product_nt(q, _pages(plan, k, scales, 0, tile, q.dtype))
    see = _live(plan, tile)
    if chosen is not None:
        bits = chosen[pl.ds(tile.first * plan.slots, width)]
        see = see & (bits.reshape(plan.tile, plan.slots) > 0)
    return tiles.cap(s * plan.options.scale, plan.options.softcap), see.reshape(1, width)


def _split(refs: tuple[Any, ...], int8: bool, narrowed: bool, pools: int) -> tuple[Any, ...]:
    """(chosen or None, pools, scales or None, the rest)."""
    chosen, refs = (refs[0], refs[1:]) if narrowed else (None, refs)
    scales = refs[pools] if int8 else None
    return chosen, refs[:pools], scales, refs[pools + int8 :]


def _read_body(plan: Plan, int8: bool, narrowed: bool) -> Any:
    """The kernel: (row, place, held, entries, q, chosen?, pools) -> (o, m, l) of each item."""

    def body(row: Any, place: Any, held: Any, entry: Any, q: Any, *refs: Any) -> None:
        chosen, (k, v), scales, (o, m, l) = _split(refs, int8, narrowed, 2)
        w = pl.program_id(0)
        mine, begin, count = q[row[w]], place[w], held[w]

        def step(it: Array, stats: tiles.Stats) -> tiles.Stats:
            tile = _tile(plan, entry, begin, count, it)
            s, see = _scores(plan, mine, k, scales, chosen, tile)
            values = _pages(plan, v, scales, 1, tile, mine.dtype)
            return tiles.grow(stats, s, see, lambda p: tiles.product_nn(p.astype(values.dtype), values))

        stats = jax.lax.fori_loop(0, pl.cdiv(count, plan.tile), step, tiles.start(plan.rows, plan.wide))
        o[...] = stats[2]
        m[...] = stats[0].reshape(plan.rows)
        l[...] = stats[1].reshape(plan.rows)

    return body


def _mass_body(plan: Plan, int8: bool, narrowed: bool) -> Any:
    """The kernel: (row, place, held, entries, q, chosen?, K pool, scales?, lse) -> mass of each slot."""

    def body(row: Any, place: Any, held: Any, entry: Any, q: Any, *refs: Any) -> None:
        chosen, (k,), scales, (lse, mass) = _split(refs, int8, narrowed, 1)
        w = pl.program_id(0)
        at, begin, count = row[w], place[w], held[w]
        mine, column = q[at], lse[at][:, None]
        width, heads = plan.tile * plan.slots, _heads(plan)

        def step(it: Array, carry: Array) -> Array:
            tile = _tile(plan, entry, begin, count, it)
            s, see = _scores(plan, mine, k, scales, chosen, tile)
            p = tiles.probabilities(s, see, column)
            mass[:, pl.ds(it * width, width)] = worklist.by_head(p, jax.lax.rem(at, plan.blocks), plan, heads)
            return carry

        jax.lax.fori_loop(0, plan.per_item // plan.tile, step, jnp.int32(0))

    return body


def _heads(plan: Plan) -> int:
    """Rows of mass: G, padded to a tile."""
    return max(16, pl.next_power_of_2(plan.groups))


def _call(plan: Plan, body: Any, name: str, found: worklist.Items, arrays: Any, narrow: Any, outputs: Any):
    """Run a body over the items; ``arrays`` are the operands before and after the chosen bits."""
    before, after = arrays
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs = [pl.BlockSpec((None, *x.shape[1:]), lambda w, d=x.ndim: (w, *(0,) * (d - 1))) for x in outputs]
    bits = [pl.BlockSpec((None, x.shape[1]), lambda w: (w, 0)) for x in narrow]
    return pl.pallas_call(
        body,
        grid=(found.row.shape[0],),
        in_specs=[anywhere] * (3 + len(before)) + bits + [anywhere] * len(after),
        out_specs=specs,
        out_shape=outputs,
        compiler_params=compat.triton_params(warps=plan.sizes.warps, stages=plan.sizes.stages),
        interpret=plan.interpret,
        name=f"ragged_decode_{name}",
    )(found.row, found.place, found.held, *before, *narrow, *after)


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    worklist.refuse_pairs("triton", pools)
    (b, n, t, h), plan = q.shape, _plan(q, pools, lists, blocks, options, interpret)
    ready, count = worklist.prepare(q, pools, lists, plan), plan.groups * t
    found, _ = worklist.items(ready.packed, plan.blocks, plan.per_item, plan.slots)
    before, narrow = [ready.packed.entry.reshape(-1), ready.q], _chosen(plan, ready, found)
    shape = (found.row.shape[0], plan.rows)
    wanted = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, plan.wide), shape, shape)]
    body = _read_body(plan, pools.scales is not None, bool(narrow))
    o, m, l = _call(plan, body, "read", found, (before, pools.all()), narrow, wanted)
    out, lse = _join(o, m, l, found.row, len(ready.q))
    outs = out.reshape(len(ready.live), -1, plan.wide)[:, :count, :h].reshape(b, n, t, h)
    lses = lse.reshape(len(ready.live), -1)[:, :count].reshape(b, n, t)
    if not options.mass:
        return outs, lses
    wanted = [jax.ShapeDtypeStruct((shape[0], _heads(plan), plan.per_item * plan.slots), jnp.float32)]
    body = _mass_body(plan, pools.scales is not None, bool(narrow))
    (mass,) = _call(plan, body, "mass", found, (before, [*pools.for_scores(), lse]), narrow, wanted)
    return outs, lses, worklist.received(_placed(plan, mass, found, ready), ready, plan, lists)


def _join(
    o: Float[Array, "W R H"], m: Float[Array, "W R"], l: Float[Array, "W R"], row: Int[Array, " W"], rows: int
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Partials of items to partials of rows; ``row`` is sorted."""
    m = jnp.where(l != 0, m, -jnp.inf)
    top = jax.ops.segment_max(m, row, rows, indices_are_sorted=True)
    w = jnp.exp(m - softmax.finite(top)[row])
    total = jax.ops.segment_sum(w * l, row, rows, indices_are_sorted=True)
    joined = jax.ops.segment_sum(w[..., None] * o, row, rows, indices_are_sorted=True)
    return softmax.finish(top, total, joined)


def _chosen(plan: Plan, ready: worklist.Prepared, found: worklist.Items) -> list[Int[Array, "W Y"]]:
    """The bits of each item's slots, if slots are chosen."""
    longest = -(-ready.live.shape[1] // plan.per_item)
    return [bits[:, 0][found.row // plan.blocks * longest + found.block] for bits in ready.narrow]


def _placed(
    plan: Plan, mass: Float[Array, "W G Y"], found: worklist.Items, ready: worklist.Prepared
) -> Float[Array, "Z G Y"]:
    """Mass of items to mass of all items that lists could have; garbage where no item went."""
    longest = -(-ready.live.shape[1] // plan.per_item)
    # Items past the real ones repeat the last one's place, and hold nothing: they may not overwrite it.
    to = jnp.where(found.held > 0, found.row * longest + found.block, found.row.shape[0])
    item = jnp.zeros(found.row.shape[0], jnp.int32).at[to].set(jnp.arange(found.row.shape[0]), mode="drop")
    return mass[item, : plan.groups]
