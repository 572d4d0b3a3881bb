"""Attention of many queries over dense keys on Hopper: the kernel of blockwise and of vertical_slash.

A program is a block of queries, which reads tiles of keys. One warpgroup has TMA copy them into rings of
buffers in shared memory; two others, of 64 queries each, multiply all of them. Barriers say which buffers are
full and which are free.

  k_full[i]   TMA -> readers             keys have landed
  v_full[i]   TMA -> readers             values have landed, and the positions of their keys
  k_free[i]   both readers -> producer   the products that read it are done; v_free[i] too

A ``TileOrder`` says which tiles are read: first those that all queries see whole, where nothing is
compared, then the edges, where a key is seen by its position. Values that nobody may see are zeroed in
shared memory before they are multiplied, NaN times 0 being NaN: each reader does a part of the tile's rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles
from pallas_kernels.hopper import ROWS, launch, plgpu, spread, start, write
from pallas_kernels.hopper_operands import (
    FAR,
    Keys,
    KeyTile,
    Operands,
    PrefillSizes,
    Program,
    Queries,
    Shared,
    TileOrder,
    memory,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

REGISTERS = {1: (240, 40), 2: (232, 40)}
"""Readers to the registers of a reader's thread and of a producer's."""


def _produce(
    sizes: PrefillSizes, order: TileOrder, operands: Operands, shared: Shared, program: Program, count: Array
) -> None:
    """Copy the queries, and tile after tile as buffers get free."""
    row, head, block = program
    for reader in range(sizes.readers):
        queries = pl.ds(block * sizes.queries + reader * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(operands.q.at[row, head, queries], shared.q.at[reader], shared.q_full)
        for n in range(len(operands.parts)):
            for which in range(2):
                source, target = operands.sees.at[row, n, which, queries], shared.sees.at[reader, n, which]
                plgpu.copy_gmem_to_smem(source, target, shared.q_full)

    def copy(keys: Keys, tile: Array, at: Array, later: Array) -> None:
        source = pl.ds(tile * sizes.block, sizes.block)

        @pl.when(later)
        def _() -> None:
            plgpu.barrier_wait(shared.k_free.at[at])

        plgpu.copy_gmem_to_smem(keys.k.at[row, head, source], shared.k.at[at], shared.k_full.at[at])

        @pl.when(later)
        def _() -> None:
            plgpu.barrier_wait(shared.v_free.at[at])

        plgpu.copy_gmem_to_smem(keys.v.at[row, head, source], shared.v.at[at], shared.v_full.at[at])
        for which, marks in enumerate((keys.at, keys.near)):
            if marks is not None:
                z = head if marks.shape[1] > 1 else 0
                target = shared.at.at[at, which]
                plgpu.copy_gmem_to_smem(marks.at[row, z, source], target, shared.v_full.at[at])

    def fetch(c: Array, carry: Array) -> Array:
        key_tile, at = order.tile(operands.order, program, c), jax.lax.rem(c, jnp.int32(sizes.stages))
        for n, keys in enumerate(operands.parts):

            @pl.when(key_tile.part == n)
            def _(keys: Keys = keys) -> None:
                copy(keys, key_tile.tile, at, c >= sizes.stages)

        return carry

    jax.lax.fori_loop(0, count, fetch, 0)


def _visible(
    sizes: PrefillSizes, shared: Shared, reader: Array, at: Array, part: Array | int
) -> Bool[Array, "R S"]:
    """Which keys of a tile each query sees."""
    shape = (ROWS, sizes.block)

    def marks(which: int) -> Array:
        positions = plgpu.layout_cast(shared.at[at, which], plgpu.Layout.WGMMA.reduce(0))
        return spread(positions, shape, 1)

    def sees(which: int) -> Array:
        bounds = plgpu.layout_cast(shared.sees[reader, part, which], plgpu.Layout.WGMMA.reduce(1))
        return spread(bounds, shape)

    see = marks(0) <= sees(0)
    return see & (marks(shared.at.shape[1] - 1) > sees(1)) if sizes.bounded else see


def _zero_what_nobody_sees(sizes: PrefillSizes, shared: Shared, reader: Array, at: Array) -> None:
    """In a tile of values, of which each reader does some pieces; all wait for all."""
    for piece in range(sizes.block // ROWS):

        @pl.when(reader == piece % sizes.readers)
        def _(first: int = piece * ROWS) -> None:
            rows = pl.ds(first, ROWS)
            there = plgpu.layout_cast(shared.at[at, 0, rows], plgpu.Layout.WGMMA.reduce(1)) < FAR
            x = shared.v[at, rows]
            shared.v[at, rows] = jnp.where(spread(there, x.shape), x, jnp.zeros_like(x))

    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.clean)
    plgpu.barrier_wait(shared.clean)


def _product(a: Any, b: Any, shape: tuple[int, ...]) -> Float[Array, "R S"]:
    def run(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _step(
    sizes: PrefillSizes, shared: Shared, reader: Array, c: Array, key_tile: KeyTile | None, stats: tiles.Stats
) -> tiles.Stats:
    """The statistics after one more tile; ``key_tile`` None: all of it is seen."""
    m, l, o = stats
    at = jax.lax.rem(c, jnp.int32(sizes.stages))
    # A zero that the compiler cannot see: addresses known before the loop would take registers all along it.
    reader = reader + jax.lax.optimization_barrier(jnp.int32(0))
    plgpu.barrier_wait(shared.k_full.at[at])
    s = _product(shared.q.at[reader], shared.k.at[at].T, (ROWS, sizes.block))
    plgpu.barrier_arrive(shared.k_free.at[at])
    s, unit = (s, sizes.scale) if sizes.softcap is None else (tiles.cap(s * sizes.scale, sizes.softcap), 1.0)
    unit *= LOG2E
    if key_tile is not None or unit <= 0:
        s, unit = s * unit, 1.0
    if key_tile is not None:
        plgpu.barrier_wait(shared.v_full.at[at])
        s = jnp.where(_visible(sizes, shared, reader, at, key_tile.part), s, tiles.HIDDEN)
    new = jnp.maximum(m, jnp.max(s, axis=1) * unit)
    # Of nothing, the max is subtracted as 0: exp of HIDDEN is 0.
    shift = new if key_tile is None else jnp.where(new > tiles.HIDDEN, new, 0.0)
    # Of a whole tile one instruction scales and subtracts.
    p, keep = jnp.exp2(s * unit - spread(shift, s.shape)), jnp.exp2(m - shift)
    shared.weights[reader] = p.astype(jnp.bfloat16)
    if key_tile is None:
        plgpu.barrier_wait(shared.v_full.at[at])
    else:
        pl.when(key_tile.dirty != 0)(lambda: _zero_what_nobody_sees(sizes, shared, reader, at))
    plgpu.commit_smem()  # for the product; and TMA may overwrite positions that were read
    more = _product(shared.weights.at[reader], shared.v.at[at], o.shape)
    plgpu.barrier_arrive(shared.v_free.at[at])
    return new, l * keep + jnp.sum(p, axis=1), o * spread(keep, o.shape) + more


def _read(
    sizes: PrefillSizes,
    order: TileOrder,
    operands: Operands,
    shared: Shared,
    program: Program,
    counts: Any,
    reader: Array,
) -> None:
    """Reads all tiles for 64 queries and writes their answer."""

    def whole(c: Array, stats: tiles.Stats) -> tiles.Stats:
        return _step(sizes, shared, reader, c, None, stats)

    def edge(c: Array, stats: tiles.Stats) -> tiles.Stats:
        return _step(sizes, shared, reader, c, order.tile(operands.order, program, c), stats)

    stats = (start(tiles.HIDDEN, (ROWS,)), start(0.0, (ROWS,)), start(0.0, (ROWS, sizes.h)))
    plgpu.barrier_wait(shared.q_full)
    stats = jax.lax.fori_loop(0, counts[0], whole, stats)
    m, l, o = jax.lax.fori_loop(counts[0], counts[1], edge, stats)
    some = l != 0  # NaN is something
    safe = jnp.where(some, l, 1.0)
    unit, lse = jnp.where(some, 1.0 / safe, 0.0), jnp.where(some, m * LN2 + jnp.log(safe), -jnp.inf)
    lost = order.lost(operands.order, program)
    if lost is not None:
        factor = jnp.where(lost, jnp.float32(jnp.nan), jnp.float32(1.0))
        unit, lse = unit * factor, lse * factor
    o = o * spread(unit, o.shape)
    at = program.row, program.head, pl.ds(program.block * sizes.queries + reader * ROWS, ROWS)
    write(o, shared.out.at[reader], operands.out.at[at])
    shared.lse[reader] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.lse.at[reader], operands.lse.at[at])
    plgpu.wait_smem_to_gmem(0)


def read(
    sizes: PrefillSizes, order: TileOrder, queries: Queries, parts: list[Keys], arrays: list[Any]
) -> tuple[Float[Array, "B K R H"], Float[Array, "B K R"]]:
    """(out, lse) of all queries, of ``sizes.dtype`` and float32.

    Args:
      sizes: static sizes.
      order: which tiles are read.
      queries: bfloat16, as are keys and values.
      parts: the keys.
      arrays: what ``order`` reads.
    """
    inputs = (queries, parts, arrays)
    b, heads, rows, h = queries.q.shape
    blocks = rows // sizes.queries

    def body(*refs: Any) -> None:
        count = len(jax.tree.leaves(inputs))
        q_refs, part_refs, order_refs = jax.tree.unflatten(jax.tree.structure(inputs), refs[:count])
        operands = Operands(q_refs.q, q_refs.sees, part_refs, order_refs, refs[count], refs[count + 1])
        shared = Shared(*refs[count + 2 :])
        z, group = jax.lax.axis_index("z"), jax.lax.axis_index("group")
        # The last queries of a causal prompt see most: they begin.
        block = blocks - 1 - jax.lax.axis_index("block")
        program = Program(jax.lax.div(z, jnp.int32(heads)), jax.lax.rem(z, jnp.int32(heads)), block)
        counts = order.counts(operands.order, program)
        most, least = REGISTERS[sizes.readers]

        @pl.when(group < sizes.readers)
        def _() -> None:
            plgpu.set_max_registers(most, action="increase")
            _read(sizes, order, operands, shared, program, counts, group)

        @pl.when(group == sizes.readers)
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            _produce(sizes, order, operands, shared, program, counts[1])

    marks = 1 if parts[0].near is None else 2
    run = launch(
        sizes.interpret,
        body,
        sizes.name,
        out_type=[
            jax.ShapeDtypeStruct((b, heads, rows, h), sizes.dtype),
            jax.ShapeDtypeStruct((b, heads, rows), jnp.float32),
        ],
        scratch_types=list(memory(sizes, len(parts), marks)),
        grid=(b * heads, blocks),
        grid_names=("z", "block"),
        num_threads=sizes.readers + 1,
        thread_name="group",
    )
    out, lse = run(*jax.tree.leaves(inputs))
    return out, lse
