"""The first kernel of ragged_decode on Hopper: a program an item; a warpgroup copies, others multiply.

The producer finds pages in the table and has TMA copy their keys and values, a tile at a time, into a ring of
buffers in shared memory; barriers say which are full and which are free. Readers take tiles in turn, each
with statistics of its own, and write them as partials of their own.

  ring      K0 V0 K1 V1 K2 V2 ...      a buffer a tile; of two readers one has the even tiles
  full[i]   TMA -> reader              every copy of the tile has landed
  free[i]   reader -> producer         the product that read it is done

Products are of bfloat16 with float32 sums (``wgmma``). Codes are multiplied by their scale first; float32 is
split into three terms of which six products are summed, so that nothing is rounded. Dead slots hide by their
score, and as values are zeroed in shared memory where a tile has any: NaN times 0 is NaN.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles
from pallas_kernels.hopper import ROWS, launch, plgpu, spread, start, write
from pallas_kernels.ragged_decode.mosaic_gpu_memory import Given, Shared, named, shared_memory
from pallas_kernels.ragged_decode.mosaic_gpu_plan import (
    COLUMNS,
    TILE,
    Plan,
    Unit,
    find_unit,
    held_tiles,
    in_terms,
    pairs,
    seen,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float

LOG2E = math.log2(math.e)

STATS = 16
"""Rows of the statistics at least: TMA reads 128 bytes of them, or more."""

REGISTERS = {1: (240, 40), 2: (232, 40)}
"""Readers to the registers of a reader's thread and of a producer's."""


Stats = tuple[Any, Any, tuple[Any, ...]]
"""(m [R], l [R], o [R, columns] ...): running max of scores times log2 e, denominator, numerators."""


class Place(NamedTuple):
    """Which program this is: row block, item, stream, its length; its first tile and how many it has."""

    z: Array
    item: Array
    stream: Array
    length: Array
    begin: Array
    held: Array


def _place(plan: Plan, given: Given) -> Place:
    z, item = jax.lax.axis_index("z"), jax.lax.axis_index("item")
    stream = jax.lax.div(z, jnp.int32(plan.blocks))
    length = jnp.clip(given.length[stream], 0, plan.entries * plan.slots)
    begin = item * plan.tiles
    return Place(z, item, stream, length, begin, jnp.clip(held_tiles(plan, length) - begin, 0, plan.tiles))


def _units(plan: Plan, given: Given, place: Place, tile: Array) -> list[Unit]:
    """Of a tile of this item."""
    first, table = (place.begin + tile) * plan.units, given.table.at[place.stream]
    return [find_unit(plan, table, place.length, first + i) for i in range(plan.units)]


def _produce(plan: Plan, given: Given, shared: Shared, place: Place) -> None:
    """Copy the queries, and tile after tile as buffers get free."""
    for term in range(plan.terms):
        plgpu.copy_gmem_to_smem(
            given.q.at[term, place.z], shared.q.at[term, pl.ds(0, plan.rows)], shared.q_full
        )

    def fetch(tile: Array, carry: Array) -> Array:
        units = _units(plan, given, place, tile)
        for which, pool in enumerate((given.k, given.v)):
            turn = 2 * tile + which
            at = jax.lax.rem(turn, jnp.int32(plan.stages))

            @pl.when(turn >= plan.stages)
            def _(at: Array = at) -> None:
                plgpu.barrier_wait(shared.free.at[at])

            for i, unit in enumerate(units):
                source = pool.at[unit.page, pl.ds(unit.first, plan.unit)]
                target = shared.ring.at[at, pl.ds(i * plan.unit, plan.unit)]
                plgpu.copy_gmem_to_smem(source, target, shared.full.at[at])
                if plan.codes:
                    plgpu.copy_gmem_to_smem(
                        given.scales.at[unit.page, which], shared.scales.at[at, i], shared.full.at[at]
                    )
        return carry

    jax.lax.fori_loop(0, place.held, fetch, 0)


def _where_live(plan: Plan, units: list[Unit], x: Array, axis: int, other: float) -> Array:
    """x, with ``other`` in the places of dead slots; nothing is compared in a tile that has none."""
    whole = functools.reduce(lambda a, b: a & b, [unit.live == plan.unit for unit in units])
    return jax.lax.cond(
        whole,
        lambda x: x,
        lambda x: jnp.where(seen(plan, units, x.shape, axis), x, jnp.full_like(x, other)),
        x,
    )


def _scaled(plan: Plan, shared: Shared, at: Array, columns: Any) -> Float[Array, "S Y"]:
    """Columns of a tile of the ring as float32, codes times the scales of their pages."""
    x = shared.ring[at, :, columns].astype(jnp.float32)
    if not plan.codes:
        return x
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)

    def of(i: int) -> Array:
        scale = plgpu.layout_cast(shared.scales[at, i, columns], plgpu.Layout.WGMMA.reduce(0))
        return spread(scale, x.shape, 1)

    scale = of(0)
    for i in range(1, plan.units):
        scale = jnp.where(row >= i * plan.unit, of(i), scale)
    return x * scale


def _operand(plan: Plan, shared: Shared, reader: Array, at: Array, units: list[Unit] | None) -> list[Any]:
    """References of a buffer's tile as terms of a product; dead slots of values (``units``) are zeros."""
    plgpu.barrier_wait(shared.full.at[at])
    tile = shared.ring.at[at]
    if plan.terms == 1 and not plan.codes:
        if units is not None:
            live = functools.reduce(lambda a, b: a + b, [unit.live for unit in units])

            @pl.when(live < TILE)
            def _() -> None:
                x = tile[...]
                tile[...] = jnp.where(seen(plan, units, x.shape, 0), x, jnp.zeros_like(x))

        return [tile]
    for c in range(0, plan.h, COLUMNS):
        columns = pl.ds(c, COLUMNS)
        x = _scaled(plan, shared, at, columns)
        x = x if units is None else _where_live(plan, units, x, 0, 0.0)
        for term, part in enumerate(in_terms(x, plan.terms)):
            shared.staged[reader, term, :, columns] = part
    plgpu.commit_smem()  # what was read here is overwritten by TMA, which looks past a thread's own order
    plgpu.barrier_arrive(shared.free.at[at])
    return [shared.staged.at[reader, term] for term in range(plan.terms)]


def _unknown_zero(plan: Plan) -> Array | int:
    """0, which the compiler does not know where terms are many.

    Places in shared memory that hang on it cannot be computed once before the loop: those of three terms take
    more registers than there are.
    """
    return 0 if plan.terms == 1 else jax.lax.optimization_barrier(jnp.int32(0))


def _product(plan: Plan, a: Any, b: list[Any], shape: tuple[int, int]) -> Float[Array, "R S"]:
    """The sum of the products of terms; what was written to shared memory before is seen by them."""
    plgpu.commit_smem()
    first = _unknown_zero(plan)

    def run(sums: Any) -> Array:
        for i, j in pairs(plan.terms):
            plgpu.wgmma(sums, a.at[i + first], b[j])
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _release(plan: Plan, shared: Shared, at: Array) -> None:
    """Give a buffer back after its product; one that was staged is back already."""
    if plan.terms == 1 and not plan.codes:
        plgpu.barrier_arrive(shared.free.at[at])


def _step(
    plan: Plan, given: Given, shared: Shared, place: Place, reader: Array, tile: Array, stats: Stats
) -> Stats:
    """The statistics after one more tile."""
    m, l, outs = stats
    reader = reader + _unknown_zero(plan)
    k_at = jax.lax.rem(2 * tile, jnp.int32(plan.stages))
    v_at = jax.lax.rem(2 * tile + 1, jnp.int32(plan.stages))
    units = _units(plan, given, place, tile)
    keys = [x.T for x in _operand(plan, shared, reader, k_at, None)]
    s = _product(plan, shared.q, keys, (ROWS, TILE))
    _release(plan, shared, k_at)
    s = tiles.cap(s * plan.options.scale, plan.options.softcap)
    if plan.options.mass:
        columns = pl.ds(tile * TILE, TILE)
        write(s, shared.out.at[reader], given.scores.at[place.z, place.item, :, columns])
    s = _where_live(plan, units, s * LOG2E, 1, tiles.HIDDEN)
    new = jnp.maximum(m, jnp.max(s, axis=1))
    # Of nothing, the max is subtracted as 0: exp of HIDDEN is 0.
    shift = jnp.where(new > tiles.HIDDEN, new, 0.0)
    p, keep = jnp.exp2(s - spread(shift, s.shape)), jnp.exp2(m - shift)
    for term, part in enumerate(in_terms(p, plan.terms)):
        shared.weights[reader, term] = part
    values = _operand(plan, shared, reader, v_at, units)
    grown = []
    for i, o in enumerate(outs):
        block = [x.at[:, pl.ds(i * plan.columns, plan.columns)] for x in values]
        more = _product(plan, shared.weights.at[reader], block, o.shape)
        grown.append(o * spread(keep, o.shape) + more)
    _release(plan, shared, v_at)
    return new, l * keep + jnp.sum(p, axis=1), tuple(grown)


def _read(plan: Plan, given: Given, shared: Shared, place: Place, reader: Array) -> None:
    """Every ``readers``-th tile of the item, from the one whose number is the reader's."""
    stats = (
        start(tiles.HIDDEN, (ROWS,)),
        start(0.0, (ROWS,)),
        tuple(start(0.0, (ROWS, plan.columns)) for _ in range(plan.h // plan.columns)),
    )
    plgpu.barrier_wait(shared.q_full)
    turns = jax.lax.div(place.held - reader + (plan.readers - 1), jnp.int32(plan.readers))
    m, l, outs = jax.lax.fori_loop(
        0,
        turns,
        lambda i, stats: _step(plan, given, shared, place, reader, reader + i * plan.readers, stats),
        stats,
    )
    at = place.item * plan.readers + reader
    shared.stats[reader, 0] = m
    shared.stats[reader, 1] = l
    for i, o in enumerate(outs):
        columns = pl.ds(i * plan.columns, plan.columns)
        write(o, shared.out.at[reader], given.o.at[place.z, at, :, columns])
    for which in range(2):
        plgpu.copy_smem_to_gmem(
            shared.stats.at[reader, which, pl.ds(0, given.stats.shape[3])],
            given.stats.at[place.z, at, which],
        )
    plgpu.wait_smem_to_gmem(0)


def read(plan: Plan, q: Array, arrays: list[Array]) -> list[Array]:
    """The partials of every reader of every item.

    Args:
      plan: sizes.
      q: queries in terms, [terms, Z, rows, H] of Z = streams times blocks.
      arrays: K and V pool, table [X, M], lengths [X], and scales where pages hold codes.

    Returns:
      Numerators [Z, J, rows, H] of J = items times readers, statistics [Z, J, 2, rows or more] (max times
      log2 e, denominator), and with mass the scores [Z, items, rows, slots of an item]. Of readers that have
      no tile nothing is written.
    """

    def body(*refs: Any) -> None:
        given, shared = named(plan, refs)
        place, group = _place(plan, given), jax.lax.axis_index("group")
        most, least = REGISTERS[plan.readers]

        @pl.when((group < plan.readers) & (place.held > group))
        def _() -> None:
            plgpu.set_max_registers(most, action="increase")
            _read(plan, given, shared, place, group)

        @pl.when((group == plan.readers) & (place.held > 0))
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            _produce(plan, given, shared, place)

    z, partials = q.shape[1], plan.items * plan.readers
    shapes = [(z, partials, plan.rows, plan.h), (z, partials, 2, max(STATS, plan.rows))]
    shapes += [(z, plan.items, plan.rows, plan.tiles * TILE)] * plan.options.mass
    run = launch(
        plan.interpret,
        body,
        "ragged_decode_read",
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=shared_memory(plan, arrays[0].dtype),
        grid=(plan.items, z),
        grid_names=("item", "z"),
        num_threads=plan.readers + 1,
        thread_name="group",
    )
    return list(run(q, *arrays))
