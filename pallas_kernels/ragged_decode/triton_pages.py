"""What a program of ragged_decode on GPU reads: its pages, found in the table, and its queries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.ragged_decode import codes
from pallas_kernels.ragged_decode.worklist import ReadSizes

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Num


class Listed(NamedTuple):
    """Lists of a program's KV head: table [M], length [1]; of a selection pages [J], bits [J S]."""

    table: Any
    length: Any
    pages: Any
    chosen: Any

    @property
    def entries(self) -> int:
        return (self.table if self.pages is None else self.pages).shape[0]


class Tile(NamedTuple):
    """A few pages of a list: ids and live slots [tile], 0 for those not there; its place among the tiles."""

    ids: Any
    live: Any
    place: Any


class Shares(NamedTuple):
    """How a list is divided: its tiles, those of each item but the last, and items with any."""

    tiles: Any
    each: Any
    items: Any


def shares(sizes: ReadSizes, count: int, selected: bool, length: Array) -> Shares:
    """Even shares of the live tiles of a list of ``count`` entries, whatever could be live of it.

    The longest share is as short as so many items allow, and no shorter than ``least``. It depends on the
    list's own length alone: what else is in a batch changes no bit of a row.
    """
    slots = sizes.slots
    # Entries up to the last live page; a selection has live pages anywhere.
    last = count if selected else jax.lax.div(jnp.clip(length, 0, count * slots) + (slots - 1), slots)
    held = jnp.asarray(last, jnp.int32)
    tiles = jax.lax.div(held + (sizes.tile - 1), jnp.int32(sizes.tile))
    each = jnp.maximum(jax.lax.div(tiles + (sizes.items - 1), jnp.int32(sizes.items)), sizes.least)
    return Shares(tiles, each, jax.lax.div(tiles + (each - 1), each))


def item(sizes: ReadSizes, lists: Listed) -> tuple[Array, Array]:
    """This program's first tile in its list, and its number of tiles."""
    divided = shares(sizes, lists.entries, lists.pages is not None, lists.length[0])
    begin = pl.program_id(0) * divided.each
    return begin, jnp.clip(divided.tiles - begin, 0, divided.each)


def find_tile(sizes: ReadSizes, lists: Listed, pool: int, place: Array) -> Tile:
    """As ``ref.page_lists``: whatever tables hold, ids are those of pages there are."""
    at = place * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)
    if lists.pages is not None:
        at = compat.load(lists.pages.at[at], mask=at < lists.entries, other=-1)
    there = (at >= 0) & (at < lists.table.shape[0])
    at = jnp.where(there, at, 0)
    ids = compat.load(lists.table.at[at], mask=there, other=-1)
    live = jnp.clip(lists.length[0] - at * sizes.slots, 0, sizes.slots)
    live = jnp.where(there & (ids >= 0) & (ids < pool), live, 0)
    return Tile(jnp.where(live > 0, ids, 0), live, place)


class Queries(NamedTuple):
    """A program's queries: their places in its KV head [R], and which of them exist."""

    at: Any
    there: Any

    def channels(self, sizes: ReadSizes, part: int) -> tuple[tuple[Array, Array], Array]:
        """Places in an array [R, H] of the channels of a part, padded to a tile's, and which are there."""
        shape = (sizes.rows, sizes.wide)
        channel = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        row = jnp.broadcast_to(self.at[:, None], shape)
        return (row, part * sizes.part + channel), self.there[:, None] & (channel < sizes.part)


def queries(sizes: ReadSizes) -> Queries:
    """The queries of this program."""
    first = jax.lax.rem(pl.program_id(1), sizes.blocks) * sizes.rows
    at = first + jnp.arange(sizes.rows, dtype=jnp.int32)
    return Queries(at, at < sizes.total)


def live_slots(sizes: ReadSizes, tile: Tile) -> Bool[Array, "C S"]:
    """Which slots of a tile's pages are live."""
    slot = jax.lax.broadcasted_iota(jnp.int32, (sizes.tile, sizes.slots), 1)
    return slot < tile.live[:, None]


def load_pages(sizes: ReadSizes, pool: Any, tile: Tile) -> Num[Array, "C S X"]:
    """The live slots of a tile's pages as they lie in the pool; zeros for dead ones."""
    shape = (sizes.tile, sizes.slots, sizes.wide)
    page = jnp.broadcast_to(tile.ids[:, None, None], shape)
    slot, channel = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    there = (slot < tile.live[:, None, None]) & (channel < sizes.part)
    return compat.load(pool.at[page, slot, channel], mask=there)


def page_scale(sizes: ReadSizes, scales: Any, which: int, part: int, tile: Tile) -> Float[Array, "C H"]:
    """What codes of keys (0) or values (1) are multiplied by, a page and channel; zeros for dead pages."""
    flat = (sizes.tile, sizes.wide)
    page = jnp.broadcast_to(tile.ids[:, None], flat)
    channel = jax.lax.broadcasted_iota(jnp.int32, flat, 1)
    there = (tile.live[:, None] > 0) & (channel < sizes.part)
    at = scales.at[page, jnp.full(flat, which, jnp.int32), part * sizes.part + channel]
    scale = compat.load(at, mask=there)
    return scale if sizes.parts == 1 else scale / codes.TIMES


class Side(NamedTuple):
    """Keys or values of a tile, one after another, and a scale that is left to multiply by; or None."""

    x: Any
    scale: Any


def side(sizes: ReadSizes, pool: Any, scales: Any, which: int, tile: Tile, dtype: Any) -> list[Side]:
    """Keys or values of a tile, each part of their channels.

    A tile of one page has one scale a channel, so its codes go into the product as they are (a code is exact
    in 16 bits) and the scale meets a query, or an output: fewer than a tile's slots. Of several pages each
    has its own, and codes are multiplied before they are joined.
    """
    loaded, flat = load_pages(sizes, pool, tile), (sizes.tile * sizes.slots, sizes.wide)

    def one(part: int, x: Array) -> Side:
        if scales is None:
            return Side(x.astype(dtype).reshape(flat), None)
        scale = page_scale(sizes, scales, which, part, tile)
        if sizes.tile == 1:
            return Side(x.astype(dtype).reshape(flat), scale)
        return Side((x.astype(jnp.float32) * scale[:, None, :]).astype(dtype).reshape(flat), None)

    return [one(i, x) for i, x in enumerate([loaded] if sizes.parts == 1 else codes.halves(loaded))]


def scores(
    sizes: ReadSizes, q: list[Array], k: Any, scales: Any, lists: Listed, tile: Tile
) -> tuple[Float[Array, "R Y"], Bool[Array, "1 Y"]]:
    """Capped scores of a tile, by each part of the queries' channels, and which of its slots are read."""
    width, keys = sizes.tile * sizes.slots, side(sizes, k, scales, 0, tile, q[0].dtype)
    s = functools.reduce(jnp.add, [tiles.product_nt(times(x, y.scale), y.x) for x, y in zip(q, keys)])
    see = live_slots(sizes, tile)
    if lists.chosen is not None:
        at = tile.place * width + jnp.arange(width, dtype=jnp.int32)
        bits = compat.load(lists.chosen.at[at], mask=at < lists.chosen.shape[0])
        see = see & (bits.reshape(sizes.tile, sizes.slots) > 0)
    return tiles.cap(s * sizes.options.scale, sizes.options.softcap), see.reshape(1, width)


def times(x: Float[Array, "R H"], scale: Float[Array, "1 H"] | None) -> Float[Array, "R H"]:
    """x by what ``side`` leaves to multiply by."""
    return x if scale is None else (x.astype(jnp.float32) * scale).astype(x.dtype)
