"""ragged_decode on TPU: a flat list of items, the pages of the next one on their way while one is read.

The grid is the list (its real length, known on the device only). Pools stay in HBM; each item's
pages come by one DMA each into one of two buffers. Statistics of a row live in VMEM from its first
item to its last. An item's pages and live slots are numbers in SMEM: those of all lists, or, where they do
not fit, those of a few items, which come by a DMA two items ahead (``mosaic_tpu_fetch``).

Layout: XLA keeps an array whose last axis is shorter than 128 lanes with another axis in the lanes.

  H a multiple of 128             pages [S, H] are read where they are
  other H, S a multiple of 128    pages lie as [H, S] and are read so (``turned``); scales are copied
  other H and S                   pages lie across the lanes: XLA copies the pool on every call

Of pages with two codes a byte H / 2 counts for H, but for their scales.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.ragged_decode import codes, mosaic_tpu_tile, worklist
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.mosaic_tpu_fetch import AHEAD, LANES, Entries, Fetch, advance, listed
from pallas_kernels.ragged_decode.mosaic_tpu_tile import mix, scores, slots, turned, visible
from pallas_kernels.ragged_decode.worklist import ReadSizes
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array

TILE_SLOTS = 1024
"""Slots of a tile, when a KV head has few queries; half of it when it has more than FEW."""

ITEM_TILES = 4
"""Tiles of an item, when a KV head has few queries: an item costs more beside its tiles than one of these."""

ITEM_BYTES = 2 << 20
"""Of keys and values of an item of several tiles; two items are in VMEM."""

FEW = 64
ROWS = 256
"""Queries of a KV head (G * T) taken together."""

MOST_PAGES = 32
SMEM_WORDS = 230_000


def _sizes(q: Array, pools: Pools, lists: Lists, blocks: Tuned, *rest: Any) -> ReadSizes:
    (_, n, t, h), size, (b, heads, m) = q.shape, pools.k.shape[1], lists.table.shape
    total, j = n // heads * t, m if lists.pages is None else lists.pages.shape[2]
    rows, many = min(total, ROWS), -(-total // min(total, ROWS))
    chosen = tuning.pick(blocks, "read", pools.k.dtype, h, tuning.Blocks())
    page = 2 * pools.k.dtype.itemsize * pools.k.size // pools.k.shape[0]
    tile, per_item = pages_of(rows, j, size, page, chosen)
    streamed = b * heads * (j + 5 * many * -(-j // per_item)) > SMEM_WORDS
    if streamed:
        # Items divide a row of LANES.
        per_item, tile = (1 << (min(x, LANES).bit_length() - 1) for x in (per_item, tile))
        words = b * heads * 5 * many * -(-j // per_item)
        if words > SMEM_WORDS:
            raise Unsupported(
                f"ragged_decode(impl='mosaic_tpu'): lists of {words} numbers for their items exceed the "
                f"{SMEM_WORDS} that SMEM holds. Read fewer rows at a time, use larger pages, or impl='xla'."
            )
    parts = codes.parts(pools.k)
    sizes = ReadSizes(n // heads, t, rows, many, per_item, tile, size, h, h, parts, chosen, *rest)
    sizes = sizes._replace(streamed=streamed)
    if parts > 1 and (sizes.part if turned(sizes) else size) % 4:
        raise Unsupported(
            f"ragged_decode(impl='mosaic_tpu'): two codes a byte in pages of {size} slots of {sizes.part} "
            "bytes; four bytes are unpacked at once. Use pages of a multiple of 4 slots, or impl='xla'."
        )
    return sizes


def pages_of(rows: int, j: int, size: int, page: int, chosen: tuning.Blocks) -> tuple[int, int]:
    """Pages of a tile and of an item, for lists of up to j pages of so many slots and bytes (K and V)."""
    few = rows <= FEW
    tile = max(1, min(j, MOST_PAGES, (chosen.k or TILE_SLOTS // (1 if few else 2)) // size))
    if chosen.item:
        tiles = chosen.item // (tile * size)
    else:
        tiles = min(ITEM_TILES if few else 1, ITEM_BYTES // (tile * page))
    return tile, tile * max(1, min(tiles, -(-j // tile)))


def _clear(sizes: ReadSizes, fetch: Fetch, item: Array, side: Array, v: Any, scales: Any) -> None:
    """Zeros for dead slots and for pages not held, since 0 * NaN is NaN; in the tiles that are read."""
    live = mosaic_tpu_tile.live(sizes, fetch, item)
    tiled = jax.lax.div(fetch.held[item] + sizes.tile - 1, sizes.tile)

    def page(p: Array, carry: Array) -> Array:
        if scales is None:
            slot = jax.lax.broadcasted_iota(jnp.int32, v.shape[2:], int(turned(sizes)))
            v[side, p] = jnp.where(slot < live(p), v[side, p], jnp.zeros((), v.dtype))
        else:
            scales[side, p] = jnp.where(live(p) > 0, scales[side, p], 0.0)
        return carry

    jax.lax.fori_loop(0, tiled * sizes.tile, page, jnp.int32(0))


def _split(refs: tuple[Any, ...], blocks: int, narrowed: bool, pools: int) -> tuple[Any, ...]:
    """(*blocks, chosen bits or None, (pools), (the rest)) of a body's operands."""
    chosen, after = (refs[blocks], blocks + 1) if narrowed else (None, blocks)
    return *refs[:blocks], chosen, refs[after : after + pools], refs[after + pools :]


def _read_body(sizes: ReadSizes, coded: bool, narrowed: bool) -> Any:
    """The kernel: (items, entries, count, q, chosen?, pools) -> (out, lse, scores?)."""

    def body(row: Any, place: Any, block: Any, held: Any, edge: Any, count: Any, lists: Any, *refs: Any):
        q, chosen, pools, (out, lse, *rest) = _split(refs, 1, narrowed, 2 + coded)
        kept, scratch = rest[: sizes.keeps_scores], rest[sizes.keeps_scores :]
        buffers, (m, l, o, sem, *ring) = tuple(scratch[: 2 + coded]), scratch[2 + coded :]
        k, v, scales = (*buffers, None)[:3]
        fetch = Fetch(pools, buffers, sem, Entries(lists, place, *ring), held, worklist.shift(sizes.slots))
        item, side = advance(fetch, count[0])

        @pl.when((edge[item] & worklist.FIRST) > 0)
        def _() -> None:
            m[...] = jnp.full_like(m, tiles.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)

        @pl.when((edge[item] & worklist.FULL) == 0)
        def _() -> None:
            _clear(sizes, fetch, item, side, v, scales)

        for first in range(0, sizes.per_item, sizes.tile):

            @pl.when(held[item] > first)
            def _(first: int = first) -> None:
                s = scores(sizes, q[...], k, scales, side, first)
                for ref in kept:
                    ref[:, slots(sizes, first)] = s
                see = visible(sizes, fetch, item, first, chosen)
                stats = (m[...], l[...], o[...])
                m[...], l[...], o[...] = tiles.grow(
                    stats, s, see, lambda p: mix(sizes, p, v, scales, side, first, q.dtype)
                )

        @pl.when((edge[item] & worklist.LAST) > 0)
        def _() -> None:
            out[...], column = tiles.finish((m[:, :1], l[:, :1], o[...]))
            lse[...] = jnp.broadcast_to(column, lse.shape)

    return body


def _mass_body(sizes: ReadSizes, coded: bool, narrowed: bool) -> Any:
    """The kernel: (items, entries, count, q, lse, chosen?, K pool, scales?) -> mass of an item's slots."""

    def body(row: Any, place: Any, block: Any, held: Any, edge: Any, count: Any, lists: Any, *refs: Any):
        q, lse, chosen, pools, (mass, *scratch) = _split(refs, 2, narrowed, 1 + coded)
        buffers, (sem, *ring) = tuple(scratch[: 1 + coded]), scratch[1 + coded :]
        k, scales = (*buffers, None)[:2]
        fetch = Fetch(pools, buffers, sem, Entries(lists, place, *ring), held, worklist.shift(sizes.slots))
        item, side = advance(fetch, count[0])

        for first in range(0, sizes.per_item, sizes.tile):

            @pl.when(held[item] > first)
            def _(first: int = first) -> None:
                s = scores(sizes, q[...], k, scales, side, first)
                p = tiles.probabilities(s, visible(sizes, fetch, item, first, chosen), lse[...])
                block = jax.lax.rem(row[item], sizes.blocks)
                mass[:, slots(sizes, first)] = worklist.by_head(p, block, sizes, sizes.groups)

    return body


def _call(
    sizes: ReadSizes, body: Any, name: str, packed: worklist.Packed, inputs: Any, pools: Any, outputs: Any
):
    """Run a body over the items; ``inputs`` and ``outputs`` are (array or shape, block spec)."""
    if turned(sizes):  # not so the scales, which have no slots
        pools = [x.swapaxes(1, 2) if x.shape[1] == sizes.slots else x for x in pools]
    if sizes.interpret is False:
        pools = [compat.in_hbm(x) for x in pools]
    items, count, lists = listed(sizes, packed)
    grid = (count,) if sizes.interpret is False else (items.row.shape[0],)
    buffers = [pltpu.VMEM((2, sizes.per_item, *pool.shape[1:]), pool.dtype) for pool in pools]
    scratch = [pltpu.VMEM((sizes.rows, n), jnp.float32) for n in (LANES, LANES, sizes.h)]
    ring = [pltpu.SMEM((AHEAD, 1, LANES), jnp.int32), pltpu.SemaphoreType.DMA((AHEAD,))] * sizes.streamed
    others, anywhere = [x for x, _ in (*inputs, *outputs)], pl.BlockSpec(memory_space=pl.ANY)
    products = 2 if name == "read" else 1
    cost = worklist.estimate(sizes, packed.entry.size, pools, others, products, sizes.blocks)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7 - sizes.streamed,
            grid=grid,
            in_specs=[anywhere] * sizes.streamed + [spec for _, spec in inputs] + [anywhere] * len(pools),
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[
                *buffers,
                *(scratch if name == "read" else ()),
                pltpu.SemaphoreType.DMA((2,)),
                *ring,
            ],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=compat.tpu_params(("arbitrary",), bounds_checks=False),
        cost_estimate=cost,
        interpret=sizes.interpret,
        name=f"ragged_decode_{name}",
    )(*items, count[None], lists, *(x for x, _ in inputs), *pools)


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), sizes = q.shape, _sizes(q, pools, lists, blocks, options, interpret)
    if interpret is False:
        pages = sizes.slots if turned(sizes) else sizes.part
        compat.check_lanes("ragged_decode", pages, *(() if pools.scales is None else (h,)))
    ready, count = worklist.prepare(q, pools, lists, sizes), sizes.groups * t
    coded, narrow = pools.scales is not None, [_chosen(sizes, ready)] if ready.narrow else []
    inputs = [(ready.q, _by_row(sizes, h))]
    wide = jax.ShapeDtypeStruct((*ready.q.shape[:2], LANES), jnp.float32)
    outputs = [
        (jax.ShapeDtypeStruct(ready.q.shape, jnp.float32), _by_row(sizes, h)),
        (wide, _by_row(sizes, LANES)),
    ]
    body = _read_body(sizes, coded, bool(narrow))
    outputs += [_received(sizes, ready)] * sizes.keeps_scores
    out, lse, *kept = _call(sizes, body, "read", ready.packed, inputs + narrow, pools.all(), outputs)
    outs = out.reshape(len(ready.live), -1, h)[:, :count].reshape(b, n, t, h)
    lses = lse[..., 0].reshape(len(ready.live), -1)[:, :count].reshape(b, n, t)
    if not options.mass:
        return outs, lses
    if sizes.keeps_scores:
        order = ready.packed.order
        return outs, lses, worklist.received_by_scores(kept[0], lses, ready.live, order, sizes, lists)
    inputs.append((lse, _by_row(sizes, LANES)))
    body = _mass_body(sizes, coded, bool(narrow))
    operands = inputs + narrow, pools.for_scores(), [_received(sizes, ready)]
    (mass,) = _call(sizes, body, "mass", ready.packed, *operands)
    return outs, lses, worklist.received(mass, ready.live, ready.packed.order, sizes, lists)


def _by_row(sizes: ReadSizes, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, sizes.rows, width), lambda i, row, *_: (row[i], 0, 0))


def _chosen(sizes: ReadSizes, ready: worklist.Prepared) -> tuple[Array, pl.BlockSpec]:
    """The bits of an item's slots."""
    blocks, longest = sizes.blocks, -(-ready.live.shape[1] // sizes.per_item)

    def at(i: Array, row: Any, place: Any, block: Any, *_: Any) -> tuple[Array, int, int]:
        return jax.lax.div(row[i], blocks) * longest + block[i], 0, 0

    return ready.narrow[0], pl.BlockSpec((None, 1, sizes.per_item * sizes.slots), at)


def _received(sizes: ReadSizes, ready: worklist.Prepared) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """Mass, or scores, of an item's slots; garbage where no item went."""
    longest = -(-ready.live.shape[1] // sizes.per_item)
    shape = (len(ready.q) * longest, sizes.groups, sizes.per_item * sizes.slots)
    spec = pl.BlockSpec(
        (None, *shape[1:]), lambda i, row, place, block, *_: (row[i] * longest + block[i], 0, 0)
    )
    return jax.ShapeDtypeStruct(shape, jnp.float32), spec
