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
from pallas_kernels.ragged_decode.mosaic_gpu_sizes import (
    COLUMNS,
    TILE,
    HopperSizes,
    Operands,
    Shared,
    Unit,
    find_unit,
    held_tiles,
    in_terms,
    named,
    pairs,
    seen,
    shared_memory,
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


class Program(NamedTuple):
    """A program's row block, item and KV head, the list's length, its first tile and number of tiles."""

    z: Array
    item: Array
    kv_head: Array
    length: Array
    begin: Array
    held: Array


def _program(sizes: HopperSizes, operands: Operands) -> Program:
    z, item = jax.lax.axis_index("z"), jax.lax.axis_index("item")
    kv_head = jax.lax.div(z, jnp.int32(sizes.blocks))
    length = jnp.clip(operands.length[kv_head], 0, sizes.entries * sizes.slots)
    begin = item * sizes.tiles
    return Program(
        z, item, kv_head, length, begin, jnp.clip(held_tiles(sizes, length) - begin, 0, sizes.tiles)
    )


def _units(sizes: HopperSizes, operands: Operands, program: Program, tile: Array) -> list[Unit]:
    """The units of a tile of this item."""
    first, table = (program.begin + tile) * sizes.units, operands.table.at[program.kv_head]
    return [find_unit(sizes, table, program.length, first + i) for i in range(sizes.units)]


def _produce(sizes: HopperSizes, operands: Operands, shared: Shared, program: Program) -> None:
    """Copy the queries, and tile after tile as buffers get free."""
    for term in range(sizes.terms):
        plgpu.copy_gmem_to_smem(
            operands.q.at[term, program.z], shared.q.at[term, pl.ds(0, sizes.rows)], shared.q_full
        )

    def fetch(tile: Array, carry: Array) -> Array:
        units = _units(sizes, operands, program, tile)
        for which, pool in enumerate((operands.k, operands.v)):
            turn = 2 * tile + which
            at = jax.lax.rem(turn, jnp.int32(sizes.stages))

            @pl.when(turn >= sizes.stages)
            def _(at: Array = at) -> None:
                plgpu.barrier_wait(shared.free.at[at])

            for i, unit in enumerate(units):
                source = pool.at[unit.page, pl.ds(unit.first, sizes.unit)]
                target = shared.ring.at[at, pl.ds(i * sizes.unit, sizes.unit)]
                plgpu.copy_gmem_to_smem(source, target, shared.full.at[at])
                if sizes.codes:
                    plgpu.copy_gmem_to_smem(
                        operands.scales.at[unit.page, which], shared.scales.at[at, i], shared.full.at[at]
                    )
        return carry

    jax.lax.fori_loop(0, program.held, fetch, 0)


def _where_live(sizes: HopperSizes, units: list[Unit], x: Array, axis: int, other: float) -> Array:
    """x, with ``other`` in the places of dead slots; nothing is compared in a tile that has none."""
    whole = functools.reduce(lambda a, b: a & b, [unit.live == sizes.unit for unit in units])
    return jax.lax.cond(
        whole,
        lambda x: x,
        lambda x: jnp.where(seen(sizes, units, x.shape, axis), x, jnp.full_like(x, other)),
        x,
    )


def _scaled(sizes: HopperSizes, shared: Shared, at: Array, columns: Any) -> Float[Array, "S Y"]:
    """Columns of a tile of the ring as float32, codes times the scales of their pages."""
    x = shared.ring[at, :, columns].astype(jnp.float32)
    if not sizes.codes:
        return x
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)

    def of(i: int) -> Array:
        scale = plgpu.layout_cast(shared.scales[at, i, columns], plgpu.Layout.WGMMA.reduce(0))
        return spread(scale, x.shape, 1)

    scale = of(0)
    for i in range(1, sizes.units):
        scale = jnp.where(row >= i * sizes.unit, of(i), scale)
    return x * scale


def _operand(
    sizes: HopperSizes, shared: Shared, reader: Array, at: Array, units: list[Unit] | None
) -> list[Any]:
    """References of a buffer's tile as terms of a product; dead slots of values (``units``) are zeros."""
    plgpu.barrier_wait(shared.full.at[at])
    tile = shared.ring.at[at]
    if sizes.terms == 1 and not sizes.codes:
        if units is not None:
            live = functools.reduce(lambda a, b: a + b, [unit.live for unit in units])

            @pl.when(live < TILE)
            def _() -> None:
                x = tile[...]
                tile[...] = jnp.where(seen(sizes, units, x.shape, 0), x, jnp.zeros_like(x))

        return [tile]
    for c in range(0, sizes.h, COLUMNS):
        columns = pl.ds(c, COLUMNS)
        x = _scaled(sizes, shared, at, columns)
        x = x if units is None else _where_live(sizes, units, x, 0, 0.0)
        for term, part in enumerate(in_terms(x, sizes.terms)):
            shared.staged[reader, term, :, columns] = part
    plgpu.commit_smem()  # what was read here is overwritten by TMA, which looks past a thread's own order
    plgpu.barrier_arrive(shared.free.at[at])
    return [shared.staged.at[reader, term] for term in range(sizes.terms)]


def _unknown_zero(sizes: HopperSizes) -> Array | int:
    """0, which the compiler does not know where terms are many.

    Places in shared memory that hang on it cannot be computed once before the loop: those of three terms take
    more registers than there are.
    """
    return 0 if sizes.terms == 1 else jax.lax.optimization_barrier(jnp.int32(0))


def _product(sizes: HopperSizes, a: Any, b: list[Any], shape: tuple[int, int]) -> Float[Array, "R S"]:
    """The sum of the products of terms; what was written to shared memory before is seen by them."""
    plgpu.commit_smem()
    first = _unknown_zero(sizes)

    def run(sums: Any) -> Array:
        for i, j in pairs(sizes.terms):
            plgpu.wgmma(sums, a.at[i + first], b[j])
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _release(sizes: HopperSizes, shared: Shared, at: Array) -> None:
    """Give a buffer back after its product; one that was staged is back already."""
    if sizes.terms == 1 and not sizes.codes:
        plgpu.barrier_arrive(shared.free.at[at])


def _step(
    sizes: HopperSizes,
    operands: Operands,
    shared: Shared,
    program: Program,
    reader: Array,
    tile: Array,
    stats: Stats,
) -> Stats:
    m, l, outs = stats
    reader = reader + _unknown_zero(sizes)
    k_at = jax.lax.rem(2 * tile, jnp.int32(sizes.stages))
    v_at = jax.lax.rem(2 * tile + 1, jnp.int32(sizes.stages))
    units = _units(sizes, operands, program, tile)
    keys = [x.T for x in _operand(sizes, shared, reader, k_at, None)]
    s = _product(sizes, shared.q, keys, (ROWS, TILE))
    _release(sizes, shared, k_at)
    s = tiles.cap(s * sizes.options.scale, sizes.options.softcap)
    if sizes.options.mass:
        columns = pl.ds(tile * TILE, TILE)
        write(s, shared.out.at[reader], operands.scores.at[program.z, program.item, :, columns])
    s = _where_live(sizes, units, s * LOG2E, 1, tiles.HIDDEN)
    new = jnp.maximum(m, jnp.max(s, axis=1))
    # Of nothing, the max is subtracted as 0: exp of HIDDEN is 0.
    shift = jnp.where(new > tiles.HIDDEN, new, 0.0)
    p, keep = jnp.exp2(s - spread(shift, s.shape)), jnp.exp2(m - shift)
    for term, part in enumerate(in_terms(p, sizes.terms)):
        shared.weights[reader, term] = part
    values = _operand(sizes, shared, reader, v_at, units)
    grown = []
    for i, o in enumerate(outs):
        block = [x.at[:, pl.ds(i * sizes.columns, sizes.columns)] for x in values]
        more = _product(sizes, shared.weights.at[reader], block, o.shape)
        grown.append(o * spread(keep, o.shape) + more)
    _release(sizes, shared, v_at)
    return new, l * keep + jnp.sum(p, axis=1), tuple(grown)


def _read(sizes: HopperSizes, operands: Operands, shared: Shared, program: Program, reader: Array) -> None:
    """Every ``readers``-th tile of the item, from the one whose number is the reader's."""
    stats = (
        start(tiles.HIDDEN, (ROWS,)),
        start(0.0, (ROWS,)),
        tuple(start(0.0, (ROWS, sizes.columns)) for _ in range(sizes.h // sizes.columns)),
    )
    plgpu.barrier_wait(shared.q_full)
    turns = jax.lax.div(program.held - reader + (sizes.readers - 1), jnp.int32(sizes.readers))
    m, l, outs = jax.lax.fori_loop(
        0,
        turns,
        lambda i, stats: _step(sizes, operands, shared, program, reader, reader + i * sizes.readers, stats),
        stats,
    )
    at = program.item * sizes.readers + reader
    shared.stats[reader, 0] = m
    shared.stats[reader, 1] = l
    for i, o in enumerate(outs):
        columns = pl.ds(i * sizes.columns, sizes.columns)
        write(o, shared.out.at[reader], operands.o.at[program.z, at, :, columns])
    for which in range(2):
        plgpu.copy_smem_to_gmem(
            shared.stats.at[reader, which, pl.ds(0, operands.stats.shape[3])],
            operands.stats.at[program.z, at, which],
        )
    plgpu.wait_smem_to_gmem(0)


def read(sizes: HopperSizes, q: Array, arrays: list[Array]) -> list[Array]:
    """The partials of every reader of every item.

    Args:
      sizes: static sizes.
      q: queries in terms, [terms, Z, rows, H] of Z = KV heads times blocks.
      arrays: K and V pool, table [X, M], lengths [X], and scales where pages hold codes.

    Returns:
      Numerators [Z, J, rows, H] of J = items times readers, statistics [Z, J, 2, rows or more] (max times
      log2 e, denominator), and with mass the scores [Z, items, rows, slots of an item]. Of readers that have
      no tile nothing is written.
    """

    def body(*refs: Any) -> None:
        operands, shared = named(sizes, refs)
        program, group = _program(sizes, operands), jax.lax.axis_index("group")
        most, least = REGISTERS[sizes.readers]

        @pl.when((group < sizes.readers) & (program.held > group))
        def _() -> None:
            plgpu.set_max_registers(most, action="increase")
            _read(sizes, operands, shared, program, group)

        @pl.when((group == sizes.readers) & (program.held > 0))
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            _produce(sizes, operands, shared, program)

    z, partials = q.shape[1], sizes.items * sizes.readers
    shapes = [(z, partials, sizes.rows, sizes.h), (z, partials, 2, max(STATS, sizes.rows))]
    shapes += [(z, sizes.items, sizes.rows, sizes.tiles * TILE)] * sizes.options.mass
    run = launch(
        sizes.interpret,
        body,
        "ragged_decode_read",
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=shared_memory(sizes, arrays[0].dtype),
        grid=(sizes.items, z),
        grid_names=("item", "z"),
        num_threads=sizes.readers + 1,
        thread_name="group",
    )
    return list(run(q, *arrays))
