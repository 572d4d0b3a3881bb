"""The Mosaic GPU body of ragged_decode: its sizes, where a list's tiles lie in its pages, its shared memory.

A tile is 64 slots: several pages, one, or part of one. What is read in one piece is a unit, the smaller of a
page and a tile:

  pages of 16     tile = 4 units of 16, each a page
  pages of 64     tile = 1 unit  of 64, a page
  pages of 256    tile = 1 unit  of 64, a quarter of a page
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import ROWS, SHARED, WIDE, plgpu, tiled
from pallas_kernels.ragged_decode.call import Options

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

TILE = 64
"""Slots of a product."""


COLUMNS = 64
"""Channels that registers hold at once on their way to terms."""


class HopperSizes(NamedTuple):
    """Static sizes of a call.

    Attributes:
      total: queries of a KV head.
      rows: of a program that are read and written, a multiple of 8.
      blocks: programs that share a KV head's queries.
      h: head dim.
      pool: pages there are.
      slots: slots of a page.
      entries: of a list.
      tiles: tiles of an item.
      readers: warpgroups that multiply.
      stages: buffers of the ring, a tile of keys or of values each.
      terms: 16-bit numbers that a number of a product is the sum of.
      codes: whether pages hold int8 codes.
      options: as in ``call``.
      interpret: how Pallas runs the kernels; None compiles them.
    """

    total: int
    rows: int
    blocks: int
    h: int
    pool: int
    slots: int
    entries: int
    tiles: int
    readers: int
    stages: int
    terms: int
    codes: bool
    options: Options
    interpret: Any

    @property
    def unit(self) -> int:
        """Slots that are read in one piece."""
        return min(self.slots, TILE)

    @property
    def columns(self) -> int:
        """Channels of an output that one product gives: registers hold no more beside terms."""
        return self.h if self.terms == 1 else COLUMNS

    @property
    def units(self) -> int:
        return TILE // self.unit

    @property
    def items(self) -> int:
        return -(-self.entries * self.slots // (self.tiles * TILE))


class Unit(NamedTuple):
    """Where a unit lies, and its live slots: none of a page that is not there, which is read as page 0."""

    page: Array
    first: Array
    live: Array


def held_tiles(sizes: HopperSizes, length: Array) -> Array:
    """Tiles of a list up to its last live slot."""
    held = jnp.clip(length, 0, sizes.entries * sizes.slots)
    return jax.lax.div(held + (TILE - 1), jnp.int32(TILE))


def find_unit(sizes: HopperSizes, table: Any, length: Array, at: Array) -> Unit:
    """The ``at``-th unit of a list, as ``ref.page_lists`` has it: tables may hold anything.

    Args:
      sizes: static sizes.
      table: reference [M].
      length: live slots of the list, at most those there are.
      at: which.
    """
    parts = jnp.int32(sizes.slots // sizes.unit)
    entry, part = jax.lax.div(at, parts), jax.lax.rem(at, parts)
    page = table[jnp.minimum(entry, sizes.entries - 1)]
    there = (entry < sizes.entries) & (page >= 0) & (page < sizes.pool)
    live = jnp.where(there, jnp.clip(length - at * sizes.unit, 0, sizes.unit), 0)
    return Unit(jnp.where(there, page, 0), part * sizes.unit, live)


def seen(sizes: HopperSizes, units: list[Unit], shape: tuple[int, int], axis: int) -> Bool[Array, "R S"]:
    """Which slots of a tile are live; slots run along ``axis``."""
    at = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    see = at < units[0].live
    for i, unit in enumerate(units[1:], 1):
        see = see | ((at >= i * sizes.unit) & (at < i * sizes.unit + unit.live))
    return see


def in_terms(x: Array, count: int) -> list[Array]:
    """float32 as a sum of bfloat16, exact with three of them (of an infinity the others are NaN)."""
    terms: list[Array] = []
    for left in reversed(range(count)):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32) if left else x
    return terms


def pairs(count: int) -> list[tuple[int, int]]:
    """Which terms of two factors are multiplied: products that are not far below float32's last bit."""
    return [(a, b) for a in range(count) for b in range(count) if a + b < count]


class Operands(NamedTuple):
    """References of a kernel: lists, pools, queries; results last."""

    q: Any
    k: Any
    v: Any
    table: Any
    length: Any
    scales: Any
    o: Any
    stats: Any
    scores: Any


class Shared(NamedTuple):
    """Shared memory of a program: buffers, and barriers over them."""

    q: Any
    ring: Any
    weights: Any
    staged: Any
    scales: Any
    out: Any
    stats: Any
    q_full: Any
    full: Any
    free: Any


def shared_memory(sizes: HopperSizes, dtype: Any) -> list[Any]:
    """What ``Shared`` names."""
    smem, exact, n = plgpu.SMEM, jnp.bfloat16, sizes.readers
    wide = tiled(sizes.h, exact)
    staged = sizes.terms > 1 or sizes.codes
    return [
        smem((sizes.terms, ROWS, sizes.h), exact, transforms=wide),
        smem((sizes.stages, TILE, sizes.h), dtype, transforms=tiled(COLUMNS, dtype)),
        smem((n, sizes.terms, ROWS, TILE), exact, transforms=tiled(TILE, exact)),
        *[smem((n, sizes.terms, TILE, sizes.h), exact, transforms=wide)] * staged,
        *[smem((sizes.stages, sizes.units, sizes.h), jnp.float32)] * sizes.codes,
        smem((n, ROWS, WIDE), jnp.float32, transforms=tiled(WIDE, jnp.float32)),
        smem((n, 2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=sizes.terms),
        plgpu.Barrier(num_arrivals=sizes.units * (1 + sizes.codes), num_barriers=sizes.stages),
        plgpu.Barrier(num_barriers=sizes.stages),
    ]


def buffers(sizes: HopperSizes, itemsize: int) -> int:
    """How many of ``sizes.stages`` fit in shared memory, in whole turns of the readers.

    A buffer is one reader's always, because its barrier counts that reader's turns.
    """
    staged = sizes.terms > 1 or sizes.codes
    terms = sizes.terms * ROWS * (sizes.h + sizes.readers * (TILE + staged * sizes.h))
    fixed = 2 * terms + 4 * sizes.readers * ROWS * (WIDE + 2)
    each = TILE * sizes.h * itemsize + sizes.codes * sizes.units * sizes.h * 4
    turn = 2 * sizes.readers if sizes.readers > 1 else 1
    return min(sizes.stages, (SHARED - fixed) // each) // turn * turn


def named(sizes: HopperSizes, refs: tuple[Any, ...]) -> tuple[Operands, Shared]:
    """References by name; None for those a call does not have."""
    left = iter(refs)

    def take(*there: bool) -> list[Any]:
        return [next(left) if x else None for x in there]

    staged = sizes.terms > 1 or sizes.codes
    operands = Operands(*take(*[True] * 5, sizes.codes, True, True, sizes.options.mass))
    return operands, Shared(*take(*[True] * 3, staged, sizes.codes, *[True] * 5))
