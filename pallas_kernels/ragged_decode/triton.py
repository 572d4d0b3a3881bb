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
    from jaxtyping import Array, Bool, Float, Num

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


def _item(plan: Plan, held: Any) -> tuple[Array, Array]:
    """Of this program: its first entry among those of its stream, and how many pages it has."""
    begin = pl.program_id(0) * plan.per_item
    return begin, jnp.clip(held[0] - begin, 0, plan.per_item)


def _tile(plan: Plan, entry: Any, begin: Array, held: Array, it: Array) -> Tile:
    at = it * plan.tile + jnp.arange(plan.tile, dtype=jnp.int32)
    found = compat.load(entry.at[begin + at], mask=at < held)
    shift = worklist.shift(plan.slots)
    return Tile(found >> shift, found & ((1 << shift) - 1), it * plan.tile)


def _live(plan: Plan, tile: Tile) -> Bool[Array, "C S"]:
    slot = jax.lax.broadcasted_iota(jnp.int32, (plan.tile, plan.slots), 1)
    return slot < tile.live[:, None]


def _pages(plan: Plan, pool: Any, tile: Tile) -> Num[Array, "C S H"]:
    """The live slots of a tile's pages as they lie in the pool; zeros for dead ones."""
    shape = (plan.tile, plan.slots, plan.wide)
    page = jnp.broadcast_to(tile.ids[:, None, None], shape)
    slot, channel = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    there = (slot < tile.live[:, None, None]) & (channel < plan.h)
    return compat.load(pool.at[page, slot, channel], mask=there)


def _scale(plan: Plan, scales: Any, which: int, tile: Tile) -> Float[Array, "C H"]:
    """What codes of keys (0) or values (1) are multiplied by, a page and channel; zeros for dead pages."""
    flat = (plan.tile, plan.wide)
    page, channel = (
        jnp.broadcast_to(tile.ids[:, None], flat),
        jax.lax.broadcasted_iota(jnp.int32, flat, 1),
    )
    there = (tile.live[:, None] > 0) & (channel < plan.h)
    return compat.load(scales.at[page, jnp.full(flat, which, jnp.int32), channel], mask=there)


def _side(
    plan: Plan, pool: Any, scales: Any, which: int, tile: Tile, dtype: Any
) -> tuple[Float[Array, "Y H"], Float[Array, "1 H"] | None]:
    """Keys or values of a tile, one after another, and a scale that is left to multiply by; or None.

    A tile of one page has one scale a channel, so its codes go into the product as they are (a code is exact
    in 16 bits) and the scale meets a query, or an output: fewer than a tile's slots. Of several pages each
    has its own, and codes are multiplied before they are joined.
    """
    x, flat = _pages(plan, pool, tile), (plan.tile * plan.slots, plan.wide)
    if scales is None:
        return x.astype(dtype).reshape(flat), None
    scale = _scale(plan, scales, which, tile)
    if plan.tile == 1:
        return x.astype(dtype).reshape(flat), scale
    return (x.astype(jnp.float32) * scale[:, None, :]).astype(dtype).reshape(flat), None


def _scores(
    plan: Plan, q: Array, k: Any, scales: Any, chosen: Any, tile: Tile
) -> tuple[Float[Array, "R Y"], Bool[Array, "1 Y"]]:
    """Capped scores of a tile, and which of its slots are read."""
    width = plan.tile * plan.slots
    keys, scale = _side(plan, k, scales, 0, tile, q.dtype)
    s = tiles.product_nt(_times(q, scale), keys)
    see = _live(plan, tile)
    if chosen is not None:
        bits = chosen[pl.ds(tile.first * plan.slots, width)]
        see = see & (bits.reshape(plan.tile, plan.slots) > 0)
    return tiles.cap(s * plan.options.scale, plan.options.softcap), see.reshape(1, width)


def _times(x: Float[Array, "R H"], scale: Float[Array, "1 H"] | None) -> Float[Array, "R H"]:
    return x if scale is None else (x.astype(jnp.float32) * scale).astype(x.dtype)


def _split(refs: tuple[Any, ...], int8: bool, narrowed: bool, pools: int) -> tuple[Any, ...]:
    """(chosen or None, pools, scales or None, the rest)."""
    chosen, refs = (refs[0], refs[1:]) if narrowed else (None, refs)
    scales = refs[pools] if int8 else None
    return chosen, refs[:pools], scales, refs[pools + int8 :]


def _read_body(plan: Plan, int8: bool, narrowed: bool) -> Any:
    """The kernel: (held, entries, q, chosen?, pools) -> (o, m, l, scores?) of each item."""

    def body(held: Any, entry: Any, q: Any, *refs: Any) -> None:
        chosen, (k, v), scales, (o, m, l, *kept) = _split(refs, int8, narrowed, 2)
        mine, (begin, count) = q[...], _item(plan, held)

        def step(it: Array, stats: tiles.Stats) -> tiles.Stats:
            tile = _tile(plan, entry, begin, count, it)
            s, see = _scores(plan, mine, k, scales, chosen, tile)
            for ref in kept:
                _keep(plan, ref, s, it)
            values, scale = _side(plan, v, scales, 1, tile, mine.dtype)
            return tiles.grow(
                stats, s, see, lambda p: _times(tiles.product_nn(p.astype(values.dtype), values), scale)
            )

        stats = jax.lax.fori_loop(0, pl.cdiv(count, plan.tile), step, tiles.start(plan.rows, plan.wide))
        o[...] = stats[2]
        m[...] = stats[0].reshape(plan.rows)
        l[...] = stats[1].reshape(plan.rows)

    return body


def _keep(plan: Plan, ref: Any, s: Float[Array, "R Y"], it: Array) -> None:
    """Write a tile's scores, of the queries there are."""
    head, slot = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (0, 1))
    compat.store(ref.at[head, it * s.shape[1] + slot], s, mask=head < plan.groups)


def _mass_body(plan: Plan, int8: bool, narrowed: bool) -> Any:
    """The kernel: (held, entries, q, chosen?, K pool, scales?, lse) -> mass of each slot."""

    def body(held: Any, entry: Any, q: Any, *refs: Any) -> None:
        chosen, (k,), scales, (lse, mass) = _split(refs, int8, narrowed, 1)
        block, (begin, count) = jax.lax.rem(pl.program_id(1), plan.blocks), _item(plan, held)
        mine, column = q[...], lse[...][:, None]
        width, heads = plan.tile * plan.slots, _heads(plan)

        def step(it: Array, carry: Array) -> Array:
            tile = _tile(plan, entry, begin, count, it)
            s, see = _scores(plan, mine, k, scales, chosen, tile)
            p = tiles.probabilities(s, see, column)
            mass[:, pl.ds(it * width, width)] = worklist.by_head(p, block, plan, heads)
            return carry

        jax.lax.fori_loop(0, plan.per_item // plan.tile, step, jnp.int32(0))

    return body


def _heads(plan: Plan) -> int:
    """Rows of mass: G, padded to a tile."""
    return max(16, pl.next_power_of_2(plan.groups))


def _call(
    plan: Plan,
    body: Any,
    name: str,
    ready: worklist.Prepared,
    pools: Any,
    after: Any,
    outputs: Any,
    products: int,
) -> Any:
    """Run a body over the items of all rows, those of one row side by side.

    Args:
      plan: sizes.
      body: the kernel.
      name: of the pass.
      ready: lists and queries.
      pools: what is read by page.
      after: further operands, one a row.
      outputs: shapes, of each row's items.
      products: of queries with an item.
    """
    packed, blocks = ready.packed, plan.blocks
    longest = -(-packed.entry.shape[1] // plan.per_item)

    def by_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, r: (r, *(0,) * (x.ndim - 1)))

    def by_stream(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, r: (r // blocks, *(0,) * (x.ndim - 1)))

    def by_item(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda i, r: (r, i, *(0,) * (x.ndim - 2)))

    held = packed.held[:, None]
    bits = pl.BlockSpec(
        (None, None, plan.per_item * plan.slots), lambda i, r: (r // blocks * longest + i, 0, 0)
    )
    lists = [(held, by_stream(held)), (packed.entry, by_stream(packed.entry)), (ready.q, by_row(ready.q))]
    chosen = [(x, bits) for x in ready.narrow]
    anywhere = [(x, pl.BlockSpec(memory_space=pl.ANY)) for x in pools]
    operands = [*lists, *chosen, *anywhere, *((x, by_row(x)) for x in after)]
    wanted = [jax.ShapeDtypeStruct((len(ready.q), longest, *size), jnp.float32) for size in outputs]
    return pl.pallas_call(
        body,
        grid=(longest, len(ready.q)),
        in_specs=[spec for _, spec in operands],
        out_specs=[by_item(x) for x in wanted],
        out_shape=wanted,
        compiler_params=compat.triton_params(warps=plan.sizes.warps, stages=plan.sizes.stages),
        cost_estimate=worklist.estimate(plan, packed, pools, [ready.q, *wanted], products),
        interpret=plan.interpret,
        name=f"ragged_decode_{name}",
    )(*(x for x, _ in operands))


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    worklist.refuse_pairs("triton", pools)
    (b, n, t, h), plan = q.shape, _plan(q, pools, lists, blocks, options, interpret)
    ready, count = worklist.prepare(q, pools, lists, plan), plan.groups * t
    int8, narrowed = pools.scales is not None, bool(ready.narrow)
    row = (plan.rows,)
    body, sizes = _read_body(plan, int8, narrowed), [(*row, plan.wide), row, row]
    sizes += [(plan.groups, plan.per_item * plan.slots)] * plan.keeps_scores
    o, m, l, *scores = _call(plan, body, "read", ready, pools.all(), [], sizes, 2)
    out, lse = _join(o, m, l)
    outs = out.reshape(len(ready.live), -1, plan.wide)[:, :count, :h].reshape(b, n, t, h)
    lses = lse.reshape(len(ready.live), -1)[:, :count].reshape(b, n, t)
    if not options.mass:
        return outs, lses
    if plan.keeps_scores:
        return outs, lses, worklist.received_by_scores(*scores, lses, ready, plan, lists)
    body, size = _mass_body(plan, int8, narrowed), (_heads(plan), plan.per_item * plan.slots)
    (mass,) = _call(plan, body, "mass", ready, pools.for_scores(), [lse], [size], 1)
    return outs, lses, worklist.received(mass[:, :, : plan.groups], ready, plan, lists)


def _join(
    o: Float[Array, "Z I R H"], m: Float[Array, "Z I R"], l: Float[Array, "Z I R"]
) -> tuple[Float[Array, "Z R H"], Float[Array, "Z R"]]:
    """Partials of items to partials of rows, in one order always: the same call twice is equal to the bit."""
    m = jnp.where(l != 0, m, -jnp.inf)
    top = jnp.max(m, axis=1)
    w = jnp.exp(m - softmax.finite(top)[:, None])
    return softmax.finish(top, jnp.sum(w * l, axis=1), jnp.sum(w[..., None] * o, axis=1))
