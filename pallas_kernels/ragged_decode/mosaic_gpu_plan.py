"""What the Mosaic GPU body of ragged_decode is compiled for, and where a list's tiles lie in its pages.

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

from pallas_kernels.hopper import plgpu

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from pallas_kernels.ragged_decode.call import Options

TILE = 64
"""Slots of a product."""


COLUMNS = 64
"""Channels that registers hold at once on their way to terms."""


class Plan(NamedTuple):
    """Static sizes of a call.

    Attributes:
      total: queries of a stream.
      rows: of a program that are read and written, a multiple of 8.
      blocks: programs that share a stream's queries.
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
        """Of a tile."""
        return TILE // self.unit

    @property
    def items(self) -> int:
        """Of the longest list."""
        return -(-self.entries * self.slots // (self.tiles * TILE))


class Unit(NamedTuple):
    """Where a unit lies, and its live slots: none of a page that is not there, which is given as page 0."""

    page: Array
    first: Array
    live: Array


def held_tiles(plan: Plan, length: Array) -> Array:
    """Tiles of a list up to its last live slot."""
    held = jnp.clip(length, 0, plan.entries * plan.slots)
    return jax.lax.div(held + (TILE - 1), jnp.int32(TILE))


def find_unit(plan: Plan, table: Any, length: Array, at: Array) -> Unit:
    """The ``at``-th unit of a list, as ``ref.page_lists`` has it: tables may hold anything.

    Args:
      plan: sizes.
      table: reference [M].
      length: live slots of the list, at most those there are.
      at: which.
    """
    parts = jnp.int32(plan.slots // plan.unit)
    entry, part = jax.lax.div(at, parts), jax.lax.rem(at, parts)
    page = table[jnp.minimum(entry, plan.entries - 1)]
    there = (entry < plan.entries) & (page >= 0) & (page < plan.pool)
    live = jnp.where(there, jnp.clip(length - at * plan.unit, 0, plan.unit), 0)
    return Unit(jnp.where(there, page, 0), part * plan.unit, live)


def seen(plan: Plan, units: list[Unit], shape: tuple[int, int], axis: int) -> Bool[Array, "R S"]:
    """Which slots of a tile are live; slots run along ``axis``."""
    at = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    found = at < units[0].live
    for i, unit in enumerate(units[1:], 1):
        found = found | ((at >= i * plan.unit) & (at < i * plan.unit + unit.live))
    return found


def in_terms(x: Array, count: int) -> list[Array]:
    """float32 as a sum of bfloat16, exact with three of them (of an infinity the others are NaN)."""
    found: list[Array] = []
    for left in reversed(range(count)):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32) if left else x
    return found


def pairs(count: int) -> list[tuple[int, int]]:
    """Which terms of two factors are multiplied: products that are not far below float32's last bit."""
    return [(a, b) for a in range(count) for b in range(count) if a + b < count]
