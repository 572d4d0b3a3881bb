"""What the Pallas bodies of ragged_decode follow: live pages in front, and a list of items.

An item is up to ``per_item`` pages of one row. A row is one KV head's queries, or a block of them when they
are many.

  KV head   pages    per_item = 2            items of row 0 | of row 1 | of row 2
  0         7 3 9                            (7 3) (9)        (4)        ()
  1         4                                first last       both       both, no pages
  2         -

``items`` packs them, so that their number follows the live pages, for a grid whose length is data (TPU).
Every row has at least one item, so that its output is always written; items past the real ones repeat the
last one and hold no pages. A GPU's grid is static and needs no such list: every row has as many items, which
take even shares of its live pages (``triton``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import softmax, tiles
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.ref import live_slots, page_lists, spread
from pallas_kernels.tuning import Blocks

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

FIRST, LAST, FULL = 1, 2, 4
"""Bits of ``Items.edge``: opens its row, closes it, and has no dead slot in any of its pages."""


class ReadSizes(NamedTuple):
    """Static sizes of a call.

    Attributes:
      groups: query heads of a KV head.
      queries: queries of a head, T.
      rows: queries of a KV head taken together.
      blocks: rows of a KV head, padded.
      per_item: pages of an item; of the longest list where items are shares of it (GPU).
      tile: pages of a tile.
      slots: slots of a page.
      h: head dim of the pools.
      wide: head dim of the queries, padded; of a part of it where there are several.
      parts: of the channels, of which a byte holds a code each (``codes``); else 1.
      tuned: sizes of blocks, and options of the compiler.
      options: as in ``call``.
      interpret: how Pallas runs the bodies.
      items: of a row at most, where they are shares of it.
      least: tiles of such a share.
      streamed: whether lists are too long to be where they are read (TPU).
    """

    groups: int
    queries: int
    rows: int
    blocks: int
    per_item: int
    tile: int
    slots: int
    h: int
    wide: int
    parts: int
    tuned: Blocks
    options: Options
    interpret: Any
    items: int = 0
    least: int = 0
    streamed: bool = False

    @property
    def part(self) -> int:
        """Channels of a part: numbers of a slot as it lies in a pool."""
        return self.h // self.parts

    @property
    def total(self) -> int:
        return self.groups * self.queries

    @property
    def keeps_scores(self) -> bool:
        """Whether mass comes from the scores of the one read: keys are read once, a score is 4 bytes.

        Of one query a head. Scores of many take more bytes than keys do: keys are read again, and mass is
        summed before it is written.
        """
        return self.options.mass and self.queries == 1 and self.blocks == 1


class Packed(NamedTuple):
    """Each KV head's live pages in front of its list.

    Attributes:
      entry: id and live slots of a page in one number, ``id << shift | live``; 0 past the live pages.
      order: place in the original list of each entry; None where that is its own.
      held: pages of each KV head up to its last live one.
    """

    entry: Int[Array, "X J"]
    order: Int[Array, "X J"] | None
    held: Int[Array, " X"]


class Items(NamedTuple):
    """One number an item: its row, its first entry in the flat list, its block of the row, pages, bits."""

    row: Int[Array, " W"]
    place: Int[Array, " W"]
    block: Int[Array, " W"]
    held: Int[Array, " W"]
    edge: Int[Array, " W"]


class Prepared(NamedTuple):
    """A call as the bodies see it.

    Attributes:
      live: live slots of each listed page, of X = B K lists.
      packed: their live pages.
      q: queries, blocks of rows of each KV head; in the dtype of products.
      narrow: the bits of chosen slots as ``arrange`` puts them, if slots are chosen.
    """

    live: Int[Array, "X J"]
    packed: Packed
    q: Float[Array, "Z R H"]
    narrow: tuple[Int[Array, "Y 1 L"], ...]


def prepare(q: Float[Array, "B N T H"], pools: Pools, lists: Lists, sizes: ReadSizes) -> Prepared:
    """Pack lists and queries."""
    (pool, size), h, (b, heads) = pools.k.shape[:2], sizes.h, lists.length.shape
    ids, live = (x.reshape(b * heads, -1) for x in page_lists(lists, pool, size))
    packed, (x, j) = pack(ids, live, pool, size, selected=lists.pages is not None), ids.shape
    rows = q.reshape(x, -1, h).astype(q.dtype if pools.scales is not None else pools.k.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, sizes.blocks * sizes.rows - rows.shape[1]), (0, sizes.wide - h)))
    narrow = (
        () if lists.slots is None else (arrange(lists.slots.reshape(x, j, size), packed, sizes.per_item),)
    )
    return Prepared(live, packed, rows.reshape(-1, sizes.rows, sizes.wide), narrow)


def shift(slots: int) -> int:
    """Bits that hold a page's number of live slots, 0 to ``slots``."""
    return slots.bit_length()


def pack(ids: Int[Array, "X J"], live: Int[Array, "X J"], pool: int, slots: int, *, selected: bool) -> Packed:
    """Live pages first, in their order.

    Whole lists have them in front already, unless a page is missing (EMPTY), which then has no live slot.

    Raises:
      Unsupported: pool and page are so large that id and live slots do not fit 31 bits.
    """
    if pool << shift(slots) >= 1 << 31:
        raise Unsupported(f"ragged_decode: {pool} pages of {slots} slots do not fit one number. Use 'xla'.")
    there = live > 0
    entry = jnp.where(there, (ids << shift(slots)) | live, 0).astype(jnp.int32)
    if not selected:
        last = jnp.where(there, jnp.arange(1, ids.shape[1] + 1, dtype=jnp.int32), 0)
        return Packed(entry, None, jnp.max(last, axis=1))
    order = jnp.argsort(~there, axis=1, stable=True).astype(jnp.int32)
    return Packed(jnp.take_along_axis(entry, order, axis=1), order, jnp.sum(there, axis=1, dtype=jnp.int32))


def unpack(x: Array, order: Int[Array, "X J"] | None) -> Array:
    """[X, J, ...] in packed order back to the order of the lists."""
    if order is None:
        return x
    back = jnp.argsort(order, axis=1)
    return jax.vmap(lambda row, at: row[at])(x, back)


def received(
    mass: Float[Array, "... G L"],
    live: Int[Array, "X J"],
    order: Int[Array, "X J"] | None,
    sizes: ReadSizes,
    lists: Lists,
) -> Float[Array, "B N M S"]:
    """Mass of each slot of each list from that of all items of all rows, 0 where no item went."""
    (x, j), (b, heads) = live.shape, lists.table.shape[:2]
    mass = mass.reshape(x, sizes.blocks, -1, sizes.groups, sizes.per_item * sizes.slots)
    by_slot = _listed(jnp.sum(mass, axis=1), live, order, sizes)
    by_slot = jnp.where((live > 0).reshape(x, 1, j, 1), by_slot, 0.0)
    return spread(by_slot.reshape(b, heads * sizes.groups, j, sizes.slots), lists)


def received_by_scores(
    scores: Float[Array, "... G L"],
    lse: Float[Array, "B N 1"],
    live: Int[Array, "X J"],
    order: Int[Array, "X J"] | None,
    sizes: ReadSizes,
    lists: Lists,
) -> Float[Array, "B N M S"]:
    """``received`` from the scores of all items; slots that were not read may hold anything."""
    (x, j), (b, heads) = live.shape, lists.table.shape[:2]
    by_slot = _listed(scores.reshape(x, -1, sizes.groups, sizes.per_item * sizes.slots), live, order, sizes)
    chosen = None if lists.slots is None else lists.slots.reshape(1, x, j, sizes.slots)
    see = live_slots(live[None], chosen, sizes.slots)[0][:, None]
    by_slot = softmax.probabilities(by_slot, see, lse.reshape(x, sizes.groups, 1))
    return spread(by_slot.reshape(b, heads * sizes.groups, j, sizes.slots), lists)


def _listed(
    x: Float[Array, "X I G L"], live: Int[Array, "X J"], order: Int[Array, "X J"] | None, sizes: ReadSizes
) -> Float[Array, "X G J S"]:
    """What items have of each of their slots, in the order of the lists."""
    kv_heads, j = live.shape
    x = x.reshape(kv_heads, -1, sizes.groups, sizes.per_item, sizes.slots).transpose(0, 1, 3, 2, 4)
    x = x.reshape(kv_heads, -1, sizes.groups, sizes.slots)[:, :j]
    return unpack(x, order).swapaxes(1, 2)


def by_head(p: Float[Array, "R Y"], block: Array, sizes: ReadSizes, heads: int) -> Float[Array, "G Y"]:
    """Sum over the queries of each of ``heads`` >= G; queries lie head by head, ``block`` of them here."""
    if sizes.queries == 1 and sizes.blocks == 1 and sizes.rows == heads:
        return p
    shape = (heads, sizes.rows)
    head = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    begin = head * sizes.queries
    at = block * sizes.rows + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    own = (at >= begin) & (at < begin + sizes.queries)
    if heads > sizes.groups:
        own = own & (head < sizes.groups)
    return tiles.product_nn(own.astype(jnp.float32), p)


def items(packed: Packed, blocks: int, per_item: int, slots: int) -> tuple[Items, Int[Array, ""]]:
    """The flat list for ``blocks`` rows a KV head, and how many of its items are real."""
    (kv_heads, j), rows = packed.entry.shape, packed.entry.shape[0] * blocks
    longest = -(-j // per_item)
    count = jnp.repeat(packed.held, blocks, axis=0)
    need = jnp.maximum(-(-count // per_item), 1)
    end = jnp.cumsum(need)
    w = jnp.arange(rows * longest, dtype=jnp.int32)
    real = w < end[-1]
    w = jnp.minimum(w, end[-1] - 1)
    row = jnp.searchsorted(end, w, side="right", method="compare_all").astype(jnp.int32)
    block = (w - (end - need)[row]).astype(jnp.int32)
    held = jnp.where(real, jnp.clip(count[row] - block * per_item, 0, per_item), 0).astype(jnp.int32)
    full = (packed.entry & ((1 << shift(slots)) - 1)) == slots
    full = jnp.pad(full, ((0, 0), (0, longest * per_item - j))).reshape(kv_heads, longest, per_item)
    edge = (
        jnp.where(block == 0, FIRST, 0)
        | jnp.where(block == need[row] - 1, LAST, 0)
        | jnp.where(jnp.all(full, axis=2)[row // blocks, block], FULL, 0)
    )
    place = (row // blocks) * j + block * per_item
    listed = Items(row, place, block, held, jnp.where(real, edge, FULL).astype(jnp.int32))
    return listed, end[-1].astype(jnp.int32)


def estimate(
    sizes: ReadSizes, pages: int, pools: Sequence[Any], others: Sequence[Any], products: int, times: int = 1
) -> pl.CostEstimate:
    """Of a body over full lists.

    Args:
      sizes: the call.
      pages: that are listed.
      pools: those it reads pages of.
      others: arrays that it reads or writes once, whole.
      products: of queries with an item, that it does.
      times: that it reads each listed page.
    """
    scores = pages * sizes.slots * sizes.rows * sizes.blocks
    page = sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in pools)
    return pl.CostEstimate(
        flops=2 * products * scores * sizes.h,
        transcendentals=scores,
        bytes_accessed=times * pages * page + sum(x.size * x.dtype.itemsize for x in others),
    )


def arrange(chosen: Bool[Array, "X J S"], packed: Packed, per_item: int) -> Int[Array, "Z 1 Y"]:
    """The bits of chosen slots as one row a block of ``per_item`` packed pages: Z = X * blocks, Y slots."""
    kv_heads, j, slots = chosen.shape
    assert packed.order is not None  # chosen slots come with selected pages
    bits = jax.vmap(lambda row, at: row[at])(chosen, packed.order).astype(jnp.int32)
    bits = jnp.pad(bits, ((0, 0), (0, -j % per_item), (0, 0)))
    return bits.reshape(kv_heads * -(-j // per_item), 1, per_item * slots)
