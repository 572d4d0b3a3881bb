"""ragged_decode on GPU: one program an item, then one a query that joins the items of its KV head.

Two kernels a call and no plan before them: every row has the same number of items, which take even shares of
its live pages, whatever the table could hold (``triton_pages.shares``). A program finds its share by the
length, its pages in the table and its queries where they lie; one for which no share is left writes nothing.
It reads its pages a few at a time, so that a tile has 16 to 128 slots whatever a page has. Dead slots are not
loaded at all. Queries are padded to 16 rows and a power of two of channels (Triton's tiles) in registers,
nothing is in memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.ragged_decode import codes, triton_join, triton_pages, worklist
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.ref import page_lists
from pallas_kernels.ragged_decode.worklist import ReadSizes
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

TILE = 64
"""Slots of a tile, or those of one page if it has more."""

ROWS = 64
PROGRAMS = 528
"""Items of all rows, at least: four a multiprocessor of an H200, which is what it runs at a time."""

ITEMS = 32
"""Items of a row at least, of one new token: rows may be of any lengths, and a long one is alone then."""

ITEM_SLOTS = (128, 512)
"""Slots of an item, at least: where rows are so few that PROGRAMS decides, and where they are more."""


def _sizes(q: Array, pools: Pools, lists: Lists, blocks: Tuned, *rest: Any) -> ReadSizes:
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
    few, exact, many = rows <= 16, pools.k.dtype.itemsize == 4, -(-total // rows)
    items, least = _items(b * heads * many, one_block=many == 1)
    # Otherwise registers spill: 64 queries' mass at 4 warps, float32 tiles of two stages.
    own = tuning.Blocks(k=TILE, item=least, warps=8 if exact or not few else 4, stages=2 - exact)
    chosen = tuning.pick(blocks, "read" if few else "chunk", pools.k.dtype, h, own)
    parts, tile = codes.parts(pools.k), max(1, chosen.k // size)
    wide, count = max(16, pl.next_power_of_2(h // parts)), -(-j // tile)
    sizes = ReadSizes(n // heads, t, rows, many, count * tile, tile, size, h, wide, parts, chosen, *rest)
    least = max(1, chosen.item // (tile * size))
    return sizes._replace(items=min(items, -(-count // least)), least=least)


def _items(rows: int, *, one_block: bool) -> tuple[int, int]:
    """Of each of so many rows: items, before it is known how many there can be, and slots of one at least.

    A chunk has blocks of queries enough, and partials as large as they are.
    """
    even = -(-PROGRAMS // rows)
    if even >= ITEMS or not one_block:
        return even, ITEM_SLOTS[0]
    return ITEMS, ITEM_SLOTS[1]


class Operands(NamedTuple):
    """A body's references."""

    lists: triton_pages.Listed
    q: Any
    pools: tuple[Any, ...]
    scales: Any
    rest: tuple[Any, ...]


def _split(refs: tuple[Any, ...], kinds: Kinds, pools: int) -> Operands:
    table, length, *rest = refs
    pages = rest.pop(0) if kinds.selected else None
    chosen = rest.pop(0) if kinds.narrowed else None
    q, *after = rest
    lists, scales = triton_pages.Listed(table, length, pages, chosen), after[pools] if kinds.codes else None
    return Operands(lists, q, tuple(after[:pools]), scales, tuple(after[pools + kinds.codes :]))


class Kinds(NamedTuple):
    """Which operands a call has, and the dtype of its products."""

    selected: bool
    narrowed: bool
    codes: bool
    dtype: Any


def _own(sizes: ReadSizes, q: Any, own: triton_pages.Queries, dtype: Any) -> list[Float[Array, "R H"]]:
    """The queries of this program, each part of their channels."""
    places = (own.channels(sizes, part) for part in range(sizes.parts))
    return [compat.load(q.at[at], mask=there).astype(dtype) for at, there in places]


def _read_body(sizes: ReadSizes, kinds: Kinds) -> Any:
    """The kernel: (lists, q, pools) -> (o, m, l, scores?) of each item; nothing of one without pages."""

    def body(*refs: Any) -> None:
        lists, q, (k, v), scales, (o, m, l, *kept) = _split(refs, kinds, 2)
        (begin, count), own = triton_pages.item(sizes, lists), triton_pages.queries(sizes)

        @pl.when(count > 0)
        def _() -> None:
            own_q = _own(sizes, q, own, kinds.dtype)

            def step(it: Array, stats: tiles.Stats) -> tiles.Stats:
                tile = triton_pages.find_tile(sizes, lists, k.shape[0], begin + it)
                s, see = triton_pages.scores(sizes, own_q, k, scales, lists, tile)
                for ref in kept:
                    _keep(sizes, ref, s, tile.place)
                values = triton_pages.side(sizes, v, scales, 1, tile, kinds.dtype)

                def mix(p: Array) -> list[Array]:
                    return [
                        triton_pages.times(tiles.product_nn(p.astype(kinds.dtype), x), scale)
                        for x, scale in values
                    ]

                return tiles.grow(stats, s, see, mix)

            top, total, none = tiles.start(sizes.rows, sizes.wide)
            start = top, total, [none] * sizes.parts
            top, total, sums = jax.lax.fori_loop(0, count, step, start)
            for part, x in enumerate(sums):
                at, there = own.channels(sizes, part)
                compat.store(o.at[at], x, mask=there)
            compat.store(m.at[own.at], top.reshape(sizes.rows), mask=own.there)
            compat.store(l.at[own.at], total.reshape(sizes.rows), mask=own.there)

    return body


def _keep(sizes: ReadSizes, ref: Any, x: Float[Array, "R Y"], place: Array) -> None:
    """Write what a tile's slots have, of each query head there is, to their places in the list."""
    head, slot = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    compat.store(ref.at[head, place * x.shape[1] + slot], x, mask=head < sizes.groups)


def _mass_body(sizes: ReadSizes, kinds: Kinds) -> Any:
    """The kernel: (lists, q, K pool, scales?, lse) -> mass of each slot."""

    def body(*refs: Any) -> None:
        lists, q, (k,), scales, (lse, mass) = _split(refs, kinds, 1)
        block, (begin, count) = jax.lax.rem(pl.program_id(1), sizes.blocks), triton_pages.item(sizes, lists)
        own = triton_pages.queries(sizes)
        own_q, heads = _own(sizes, q, own, kinds.dtype), max(16, pl.next_power_of_2(sizes.groups))
        column = compat.load(lse.at[own.at], mask=own.there, other=-jnp.inf)[:, None]

        def step(it: Array, carry: Array) -> Array:
            tile = triton_pages.find_tile(sizes, lists, k.shape[0], begin + it)
            s, see = triton_pages.scores(sizes, own_q, k, scales, lists, tile)
            p = worklist.by_head(tiles.probabilities(s, see, column), block, sizes, heads)
            _keep(sizes, mass, p, tile.place)
            return carry

        jax.lax.fori_loop(0, count, step, jnp.int32(0))

    return body


def _by_kv_head(sizes: ReadSizes, x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, r: (r // sizes.blocks, *(0,) * (len(x.shape) - 1)))


def _by_item(sizes: ReadSizes, x: Any) -> pl.BlockSpec:
    """A KV head's item."""
    more = (0,) * (len(x.shape) - 2)
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda i, r: (r // sizes.blocks, i, *more))


def _call(
    sizes: ReadSizes, body: Any, name: str, entries: int, lists: Any, pools: Any, outputs: Any, products: int
) -> Any:
    """Run a body over the items of all rows, those of one row side by side.

    Args:
      sizes: static sizes.
      body: the kernel.
      name: of the pass.
      entries: of a list.
      lists: operands of which a program gets its KV head's: before the pools, and after them.
      pools: what is read by page.
      outputs: (shape, spec) of each.
      products: of queries with an item.
    """
    before, after = ([(x, _by_kv_head(sizes, x)) for x in some] for some in lists)
    operands = [*before, *((x, pl.BlockSpec(memory_space=pl.ANY)) for x in pools), *after]
    kv_heads, wanted = len(lists[0][0]), [x for x, _ in outputs]
    cost = worklist.estimate(sizes, kv_heads * entries, pools, [lists[0][-1], *wanted], products)
    return pl.pallas_call(
        body,
        grid=(sizes.items, kv_heads * sizes.blocks),
        in_specs=[spec for _, spec in operands],
        out_specs=[spec for _, spec in outputs],
        out_shape=wanted,
        compiler_params=compat.triton_params(warps=sizes.tuned.warps, stages=sizes.tuned.stages),
        cost_estimate=cost,
        interpret=sizes.interpret,
        name=f"ragged_decode_{name}",
    )(*(x for x, _ in operands))


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), sizes = q.shape, _sizes(q, pools, lists, blocks, options, interpret)
    kv_heads, coded = b * lists.table.shape[1], pools.scales is not None
    list_arrays = [x.reshape(kv_heads, -1) for x in (lists.table, lists.length)]
    list_arrays += [] if lists.pages is None else [lists.pages.reshape(kv_heads, -1)]
    list_arrays += [] if lists.slots is None else [lists.slots.reshape(kv_heads, -1).astype(jnp.int8)]
    kinds = Kinds(
        lists.pages is not None, lists.slots is not None, coded, q.dtype if coded else pools.k.dtype
    )
    entries = list_arrays[2 if kinds.selected else 0].shape[1]
    own, total = [*list_arrays, q.reshape(kv_heads, sizes.total, h)], sizes.total
    dims = (total, h), (total,), (total,)
    shapes = [jax.ShapeDtypeStruct((kv_heads, sizes.items, *size), jnp.float32) for size in dims]
    outputs = [(x, _by_item(sizes, x)) for x in shapes]
    listed = (sizes.groups, sizes.per_item * sizes.slots)
    if sizes.keeps_scores:
        scores = jax.ShapeDtypeStruct((kv_heads, *listed), jnp.float32)
        outputs.append((scores, _by_kv_head(sizes, scores)))
    results = _call(sizes, _read_body(sizes, kinds), "read", entries, (own, ()), pools.all(), outputs, 2)
    out, lse = triton_join.join(sizes, entries, kinds.selected, list_arrays[1], *results[:3])
    outs, lses = out.reshape(b, n, t, h), lse.reshape(b, n, t)
    if not options.mass:
        return outs, lses
    live = page_lists(lists, *pools.k.shape[:2])[1].reshape(kv_heads, -1)
    if sizes.keeps_scores:
        return outs, lses, worklist.received_by_scores(results[3], lses, live, None, sizes, lists)
    row = pl.BlockSpec((None, *listed), lambda i, r: (r, 0, 0))
    wanted = [(jax.ShapeDtypeStruct((kv_heads * sizes.blocks, *listed), jnp.float32), row)]
    body = _mass_body(sizes, kinds)
    (mass,) = _call(sizes, body, "mass", entries, (own, [lse]), pools.for_scores(), wanted, 1)
    return outs, lses, worklist.received(mass, live, None, sizes, lists)
