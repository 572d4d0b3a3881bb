"""ragged_decode on TPU: a flat list of items, the pages of the next one on their way while one is read.

The grid is the list (its real length, known on the device only). Pools stay in HBM; each item's
pages come by one DMA each into one of two buffers. Statistics of a row live in VMEM from its first
item to its last. An item's pages and live slots are numbers in SMEM: those of all lists, or, where they do
not fit, those of a few items, which come by a DMA two items ahead (``mosaic_tpu_fetch``).

Layout: XLA keeps an array whose last axis is shorter than 128 lanes with another axis in the lanes.

  H a multiple of 128             pages [S, H] are read where they are
  other H, S a multiple of 128    pages lie as [H, S] and are read so (``_turned``); scales are copied
  other H and S                   pages lie across the lanes: XLA copies the pool on every call

Of pages with two codes a byte H / 2 counts for H, but for their scales.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, lowering, tiles, tuning
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.ragged_decode import codes, worklist
from pallas_kernels.ragged_decode.mosaic_tpu_fetch import AHEAD, LANES, Entries, Fetch, advance, listed
from pallas_kernels.ragged_decode.worklist import Plan

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from pallas_kernels.ragged_decode.call import Lists, Options, Pools
    from pallas_kernels.tuning import Tuned

ITEM_SLOTS = 1024
"""Slots of an item, when a stream has few queries; half of it when it has more than FEW."""

FEW = 64
ROWS = 256
"""Queries of a stream (G * T) taken together."""

MATRIX_UNIT = {"TPU v2": 128, "TPU v3": 128, "TPU v4": 128, "TPU v5": 128}
"""Rows and columns of a matrix unit, by how a kind of device begins; of later ones 256."""

FEW_ROWS = 16
"""Queries of a stream up to which several pages of codes go through one product, each with rows of its own."""

MOST_PAGES = 32
SMEM_WORDS = 230_000
HIGH_BITS = np.int32(0xF0F0F0F0 - (1 << 32))


def _plan(q: Array, pools: Pools, lists: Lists, blocks: Tuned, *rest: Any) -> Plan:
    (_, n, t, h), size, (b, heads, m) = q.shape, pools.k.shape[1], lists.table.shape
    total, j = n // heads * t, m if lists.pages is None else lists.pages.shape[2]
    rows = min(total, ROWS)
    own = tuning.Blocks(item=ITEM_SLOTS if rows <= FEW else ITEM_SLOTS // 2)
    wanted = tuning.pick(blocks, "read", pools.k.dtype, h, own).item
    per_item, many = max(1, min(j, MOST_PAGES, wanted // size)), -(-total // rows)
    streamed = b * heads * (j + 5 * many * -(-j // per_item)) > SMEM_WORDS
    if streamed:
        per_item = 1 << (per_item.bit_length() - 1)  # divides a row of LANES
        words = b * heads * 5 * many * -(-j // per_item)
        if words > SMEM_WORDS:
            raise Unsupported(
                f"ragged_decode(impl='mosaic_tpu'): lists of {words} numbers for their items exceed the "
                f"{SMEM_WORDS} that SMEM holds. Read fewer rows at a time, use larger pages, or impl='xla'."
            )
    parts = codes.parts(pools.k)
    plan = Plan(n // heads, t, rows, many, per_item, per_item, size, h, h, parts, own, *rest)
    plan = plan._replace(streamed=streamed)
    if parts > 1 and (plan.part if _turned(plan) else size) % 4:
        raise Unsupported(
            f"ragged_decode(impl='mosaic_tpu'): two codes a byte in pages of {size} slots of {plan.part} "
            "bytes; four bytes are unpacked at once. Use pages of a multiple of 4 slots, or impl='xla'."
        )
    return plan


def _turned(plan: Plan) -> bool:
    """Whether pages are [H, S]: how XLA holds pools of short heads."""
    return plan.part % LANES != 0 and plan.slots % LANES == 0


def _width(plan: Plan) -> int:
    """Slots of an item."""
    return plan.per_item * plan.slots


def _live(plan: Plan, fetch: Fetch, item: Array) -> Callable[[Array | int], Array]:
    """Live slots of each page of an item; 0 of a page it does not hold."""
    held, numbers, bits = fetch.held[item], fetch.entries.of(item), (1 << worklist.shift(plan.slots)) - 1
    return lambda p: jnp.where(p < held, numbers(p), 0) & bits


def _visible(plan: Plan, fetch: Fetch, item: Array, chosen: Any) -> Bool[Array, "1 Y"]:
    live = _live(plan, fetch, item)

    def page(p: int) -> Array:
        slot = jax.lax.broadcasted_iota(jnp.int32, (1, plan.slots), 1)
        return (slot < live(p)).astype(jnp.int32)

    see = jnp.concatenate([page(p) for p in range(plan.per_item)], axis=1)
    return (see if chosen is None else see * chosen[...]) > 0


def _numbers(plan: Plan, page: Array, dtype: Any) -> Float[Array, "S H"]:
    """A page's numbers, or codes; of two codes a byte ``codes.TIMES`` times, one part beside the other."""
    if plan.parts == 1:
        return page.astype(dtype)
    # As ``codes.halves``, of four bytes at once: single bytes have no shifts. Joined before they are floats,
    # which v5e would unpack and pack again.
    bits = pltpu.bitcast(page, jnp.int32)
    both = jnp.concatenate([(bits << 4) & HIGH_BITS, bits & HIGH_BITS], axis=0 if _turned(plan) else 1)
    return pltpu.bitcast(both, jnp.int8).astype(dtype)


def _scale(plan: Plan, scale: Float[Array, "1 H"]) -> Float[Array, "1 H"]:
    """What ``_numbers`` of codes are multiplied by."""
    return scale if plan.parts == 1 else scale / codes.TIMES


def _together(plan: Plan, coded: bool) -> int:
    """Pages that one product reads: of codes several where queries are few, since each page has a scale."""
    if not coded:
        return plan.per_item
    if plan.rows > FEW_ROWS:
        return 1
    unit = next((n for name, n in MATRIX_UNIT.items() if lowering.kind().startswith(name)), 256)
    return math.gcd(plan.per_item, max(1, unit // plan.slots))


def _some(plan: Plan, pages: Any, side: Array, first: int, many: int, dtype: Any) -> Array:
    """Pages of an item as one matrix, [S, H], or [H, S] where pages are turned."""
    if _turned(plan):
        return jnp.concatenate([_numbers(plan, pages[side, first + p], dtype) for p in range(many)], axis=1)
    some = pages[side, first : first + many].reshape(many * plan.slots, plan.part)
    return _numbers(plan, some, dtype)


def _scores(plan: Plan, q: Array, k: Any, scales: Any, side: Array) -> Float[Array, "R Y"]:
    """Capped scores of an item; the scales of codes are folded into the queries."""
    product = tiles.product_nn if _turned(plan) else tiles.product_nt
    many = _together(plan, scales is not None)

    def pages(first: int) -> Array:
        mine = q
        if scales is not None:  # once a page, one under the other
            wide = q.astype(jnp.float32)
            scaled = [wide * _scale(plan, scales[side, first + p, 0:1]) for p in range(many)]
            mine = jnp.concatenate(scaled, axis=0).astype(q.dtype)
        s = product(mine, _some(plan, k, side, first, many, q.dtype))
        return s if scales is None else _diagonal(plan, s, many)

    s = jnp.concatenate([pages(p) for p in range(0, plan.per_item, many)], axis=1)
    return tiles.cap(s * plan.options.scale, plan.options.softcap)


def _diagonal(plan: Plan, s: Float[Array, "P*R S"], many: int) -> Float[Array, "R S"]:
    """Of rows once a page those of each slot's own page; the opposite of ``_blocks``.

            page 0   page 1
    rows 0  kept     -            -> rows    kept 0   kept 1
    rows 1  -        kept
    """
    found, slot = s[: plan.rows], jax.lax.broadcasted_iota(jnp.int32, (plan.rows, s.shape[1]), 1)
    for i in range(1, many):
        found = jnp.where(slot >= i * plan.slots, s[i * plan.rows : (i + 1) * plan.rows], found)
    return found


def _blocks(plan: Plan, p: Float[Array, "R S"], many: int) -> Float[Array, "P*R S"]:
    """Rows once a page with zeros for the slots of others, so that each page's sum is in rows of its own."""
    slot = jax.lax.broadcasted_iota(jnp.int32, p.shape, 1)
    after = [slot >= i * plan.slots for i in range(1, many)]
    inside = zip([None, *after], [*after, None])
    rows = []
    for begun, over in inside:
        mine = p if begun is None else jnp.where(begun, p, 0.0)
        rows.append(mine if over is None else jnp.where(over, 0.0, mine))
    return jnp.concatenate(rows, axis=0)


def _mix(plan: Plan, p: Array, v: Any, scales: Any, side: Array, dtype: Any) -> Float[Array, "R H"]:
    product = tiles.product_nt if _turned(plan) else tiles.product_nn
    many = _together(plan, scales is not None)
    if scales is None:
        return product(p.astype(dtype), _some(plan, v, side, 0, many, dtype))
    out = jnp.zeros((p.shape[0], plan.h), jnp.float32)
    for first in range(0, plan.per_item, many):
        blocks = _blocks(plan, p[:, first * plan.slots : (first + many) * plan.slots], many)
        more = product(blocks.astype(dtype), _some(plan, v, side, first, many, dtype))
        for i in range(many):
            out += more[i * plan.rows : (i + 1) * plan.rows] * _scale(plan, scales[side, first + i, 1:2])
    return out


def _clear(plan: Plan, fetch: Fetch, item: Array, side: Array, v: Any, scales: Any) -> None:
    """Zeros for dead slots and for pages not held, since 0 * NaN is NaN."""

    live = _live(plan, fetch, item)

    def page(p: Array, carry: Array) -> Array:
        if scales is None:
            slot = jax.lax.broadcasted_iota(jnp.int32, v.shape[2:], int(_turned(plan)))
            v[side, p] = jnp.where(slot < live(p), v[side, p], jnp.zeros((), v.dtype))
        else:
            scales[side, p] = jnp.where(live(p) > 0, scales[side, p], 0.0)
        return carry

    jax.lax.fori_loop(0, plan.per_item, page, jnp.int32(0))


def _split(refs: tuple[Any, ...], blocks: int, narrowed: bool, pools: int) -> tuple[Any, ...]:
    """(*blocks, chosen bits or None, (pools), (the rest)) of a body's operands."""
    chosen, after = (refs[blocks], blocks + 1) if narrowed else (None, blocks)
    return *refs[:blocks], chosen, refs[after : after + pools], refs[after + pools :]


def _read_body(plan: Plan, coded: bool, narrowed: bool) -> Any:
    """The kernel: (items, entries, count, q, chosen?, pools) -> (out, lse, scores?)."""

    def body(row: Any, place: Any, block: Any, held: Any, edge: Any, count: Any, lists: Any, *refs: Any):
        del row, block
        q, chosen, pools, (out, lse, *rest) = _split(refs, 1, narrowed, 2 + coded)
        kept, scratch = rest[: plan.keeps_scores], rest[plan.keeps_scores :]
        buffers, (m, l, o, sem, *ring) = tuple(scratch[: 2 + coded]), scratch[2 + coded :]
        k, v, scales = (*buffers, None)[:3]
        fetch = Fetch(pools, buffers, sem, Entries(lists, place, *ring), held, worklist.shift(plan.slots))
        item, side = advance(fetch, count[0])

        @pl.when((edge[item] & worklist.FIRST) > 0)
        def _() -> None:
            m[...] = jnp.full_like(m, tiles.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)

        @pl.when((edge[item] & worklist.FULL) == 0)
        def _() -> None:
            _clear(plan, fetch, item, side, v, scales)

        @pl.when(held[item] > 0)
        def _() -> None:
            s = _scores(plan, q[...], k, scales, side)
            for ref in kept:
                ref[...] = s
            see = _visible(plan, fetch, item, chosen)
            stats = (m[...], l[...], o[...])
            m[...], l[...], o[...] = tiles.grow(
                stats, s, see, lambda p: _mix(plan, p, v, scales, side, q.dtype)
            )

        @pl.when((edge[item] & worklist.LAST) > 0)
        def _() -> None:
            out[...], column = tiles.finish((m[:, :1], l[:, :1], o[...]))
            lse[...] = jnp.broadcast_to(column, lse.shape)

    return body


def _mass_body(plan: Plan, coded: bool, narrowed: bool) -> Any:
    """The kernel: (items, entries, count, q, lse, chosen?, K pool, scales?) -> mass of an item's slots."""

    def body(row: Any, place: Any, block: Any, held: Any, edge: Any, count: Any, lists: Any, *refs: Any):
        del block, edge
        q, lse, chosen, pools, (mass, *scratch) = _split(refs, 2, narrowed, 1 + coded)
        buffers, (sem, *ring) = tuple(scratch[: 1 + coded]), scratch[1 + coded :]
        k, scales = (*buffers, None)[:2]
        fetch = Fetch(pools, buffers, sem, Entries(lists, place, *ring), held, worklist.shift(plan.slots))
        item, side = advance(fetch, count[0])

        @pl.when(held[item] > 0)
        def _() -> None:
            s = _scores(plan, q[...], k, scales, side)
            p = tiles.probabilities(s, _visible(plan, fetch, item, chosen), lse[...])
            mass[...] = worklist.by_head(p, jax.lax.rem(row[item], plan.blocks), plan, plan.groups)

    return body


def _call(plan: Plan, body: Any, name: str, packed: worklist.Packed, inputs: Any, pools: Any, outputs: Any):
    """Run a body over the items; ``inputs`` and ``outputs`` are (array or shape, block spec)."""
    if _turned(plan):  # not so the scales, which have no slots
        pools = [x.swapaxes(1, 2) if x.shape[1] == plan.slots else x for x in pools]
    if plan.interpret is False:
        pools = [compat.in_hbm(x) for x in pools]
    found, count, lists = listed(plan, packed)
    grid = (count,) if plan.interpret is False else (found.row.shape[0],)
    buffers = [pltpu.VMEM((2, plan.per_item, *pool.shape[1:]), pool.dtype) for pool in pools]
    scratch = [pltpu.VMEM((plan.rows, n), jnp.float32) for n in (LANES, LANES, plan.h)]
    ring = [pltpu.SMEM((AHEAD, 1, LANES), jnp.int32), pltpu.SemaphoreType.DMA((AHEAD,))] * plan.streamed
    others, anywhere = [x for x, _ in (*inputs, *outputs)], pl.BlockSpec(memory_space=pl.ANY)
    cost = worklist.estimate(plan, packed.entry.size, pools, others, 2 if name == "read" else 1, plan.blocks)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7 - plan.streamed,
            grid=grid,
            in_specs=[anywhere] * plan.streamed + [spec for _, spec in inputs] + [anywhere] * len(pools),
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
        interpret=plan.interpret,
        name=f"ragged_decode_{name}",
    )(*found, count[None], lists, *(x for x, _ in inputs), *pools)


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), plan = q.shape, _plan(q, pools, lists, blocks, options, interpret)
    ready, count = worklist.prepare(q, pools, lists, plan), plan.groups * t
    coded, narrow = pools.scales is not None, [_chosen(plan, ready)] if ready.narrow else []
    inputs = [(ready.q, _by_row(plan, h))]
    wide = jax.ShapeDtypeStruct((*ready.q.shape[:2], LANES), jnp.float32)
    outputs = [
        (jax.ShapeDtypeStruct(ready.q.shape, jnp.float32), _by_row(plan, h)),
        (wide, _by_row(plan, LANES)),
    ]
    body = _read_body(plan, coded, bool(narrow))
    outputs += [_received(plan, ready)] * plan.keeps_scores
    out, lse, *scores = _call(plan, body, "read", ready.packed, inputs + narrow, pools.all(), outputs)
    found = out.reshape(len(ready.live), -1, h)[:, :count].reshape(b, n, t, h)
    lses = lse[..., 0].reshape(len(ready.live), -1)[:, :count].reshape(b, n, t)
    if not options.mass:
        return found, lses
    if plan.keeps_scores:
        return (
            found,
            lses,
            worklist.received_by_scores(scores[0], lses, ready.live, ready.packed.order, plan, lists),
        )
    inputs.append((lse, _by_row(plan, LANES)))
    body = _mass_body(plan, coded, bool(narrow))
    operands = inputs + narrow, pools.for_scores(), [_received(plan, ready)]
    (mass,) = _call(plan, body, "mass", ready.packed, *operands)
    return found, lses, worklist.received(mass, ready.live, ready.packed.order, plan, lists)


def _by_row(plan: Plan, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, plan.rows, width), lambda i, row, *_: (row[i], 0, 0))


def _longest(plan: Plan, ready: worklist.Prepared) -> int:
    """Items of the longest list there can be."""
    return -(-ready.live.shape[1] // plan.per_item)


def _chosen(plan: Plan, ready: worklist.Prepared) -> tuple[Array, pl.BlockSpec]:
    """The bits of an item's slots."""
    blocks, longest = plan.blocks, _longest(plan, ready)

    def at(i: Array, row: Any, place: Any, block: Any, *_: Any) -> tuple[Array, int, int]:
        return jax.lax.div(row[i], blocks) * longest + block[i], 0, 0

    return ready.narrow[0], pl.BlockSpec((None, 1, _width(plan)), at)


def _received(plan: Plan, ready: worklist.Prepared) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """Mass, or scores, of an item's slots; garbage where no item went."""
    longest = _longest(plan, ready)

    def at(i: Array, row: Any, place: Any, block: Any, *_: Any) -> tuple[Array, int, int]:
        return row[i] * longest + block[i], 0, 0

    shape = (len(ready.q) * longest, plan.groups, _width(plan))
    return jax.ShapeDtypeStruct(shape, jnp.float32), pl.BlockSpec((None, *shape[1:]), at)
