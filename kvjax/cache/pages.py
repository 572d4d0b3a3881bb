"""Pages: what outlived the window, from one pool, with one length per KV head.

Each KV head of a row owns R page lists: one, or two when a selection part reads some tokens always and
chooses among the rest. Live slots are a prefix of a list: a slot freed in the middle is filled at once from
the list's last slot, so a read needs lengths and never a mask.

  list of one KV head, S = 4, length 6:   page 7 [a b c d]   page 2 [e f . .]
  free slot 1                        :   page 7 [a f c d]   page 2 [e . . .]
  free slot 0                        :   page 7 [e f c d]   page 2 returns to the pool

The order of slots carries no meaning; keys are stored after RoPE and ``pos`` says which token is where.

Why: kvjax/DESIGN.md, 3.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kvjax.cache.ring import Entry
from kvjax.cache.write import DROP, along, blocks, scattered, split, there
from kvjax.sharding.specs import HEADS, POOL
from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num


@pytree(static=("shared", "turned"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The paged tokens of one layer: a pool, and which KV head owns which page of it.

    Attributes:
      k, v: the pool, X = H; codes when the storage part quantises, and X what holds those of H channels.
      scales: of codes, arrays that begin with [P]: [P, 2, H], one a channel for K and V, or what else the
        storage part has (``Storage.scales``). They only grow while a page is owned. None for float pools.
      pos: true position of the token in each slot.
      meta: per-slot values of policy parts; mostly one float a slot (``Part.arrays``).
      summary: per-page values of the selection part, each a function of the page's content alone.
      table: ids of the pages of each list, in list order; EMPTY beyond the last.
      length: live slots of each list.
      refs: owners of each page; 0 is free. Overwriting a page needs a count of one.
      free: ``free[:n_free]`` are the ids of the free pages, a stack.
      n_free: pages on the stack.
      overflow: a token could not be stored because the pool or a list was full; never set in a sound run.
      shared: may a page have several owners? Static, since such pools are read by other programs.
      turned: do keys and values lie turned by a Hadamard matrix? A read then turns queries and output.
    """

    k: Num[Array, "P S X"]
    v: Num[Array, "P S X"]
    scales: Any
    pos: Int[Array, "P S"]
    meta: dict[str, Float[Array, "P S"]]
    summary: dict[str, Float[Array, "P ..."]]
    table: Int[Array, "B K R M"]
    length: Int[Array, "B K R"]
    refs: Int[Array, " P"]
    free: Int[Array, " P"]
    n_free: Int[Array, ""]
    overflow: Bool[Array, ""]
    shared: bool = False
    turned: bool = False

    per_device = ("n_free", "overflow")

    def specs(self) -> Any:
        """How it is cut over devices: the pool by device, page lists by row and KV head."""
        return dataclasses.replace(jax.tree.map(lambda _: POOL, self), table=HEADS, length=HEADS)

    @property
    def size(self) -> int:
        """S, slots of a page."""
        return self.pos.shape[1]

    @property
    def count(self) -> int:
        """P, pages of the pool."""
        return self.pos.shape[0]

    @property
    def span(self) -> int:
        """Slots that a list can point to."""
        return self.table.shape[3] * self.size

    @property
    def head_dim(self) -> int:
        """H, channels of a key."""
        return (jax.tree.leaves(self.scales) or [self.k])[0].shape[-1]


class Coming(NamedTuple):
    """Keys that will follow those that are written, and where they will lie; pages that are not there yet are
    out of range."""

    page: Int[Array, "B K C"]
    slot: Int[Array, "B K C"]
    k: Float[Array, "B K C H"]


class Codec(Protocol):
    """What the pages need of a storage part: see ``kvjax.algebra.Storage``."""

    def write(
        self, pages: Pages, page: Array, slot: Array, k: Array, v: Array, coming: Coming | None = None
    ) -> Pages:
        """Put k, v into slots; pages out of range are dropped."""
        ...

    def read(self, pages: Pages, page: Array, slot: Array) -> tuple[Array, Array]:
        """The k, v that a read would see."""
        ...


class Summariser(Protocol):
    """What the pages need of a selection part: see ``kvjax.algebra.Selection``."""

    def summarise(self, k: Array, live: Array) -> dict[str, Array]:
        """Per-page values of pages with these keys."""
        ...


def used(pages: Pages) -> Int[Array, "B K R"]:
    """Pages owned by each list."""
    return blocks(pages.length, pages.size)


# --- writing -------------------------------------------------------------------------------------


def append(
    pages: Pages,
    codec: Codec,
    chooser: Summariser,
    new: Entry,
    list_id: Int[Array, "B K T"],
    hole: Int[Array, "B K T"] | None = None,
    coming: tuple[Array, Array] | None = None,
) -> Pages:
    """Store tokens at the ends of their KV heads' lists, taking pages from the pool as needed.

    Args:
      pages: as they are.
      codec: how a slot is held.
      chooser: recomputes the summaries of touched pages.
      new: T tokens; ``new.admit`` is not looked at here.
      list_id: the list each token goes to, per KV head, or EMPTY for tokens that are not stored.
      hole: a live slot of that list whose token is replaced by this one; EMPTY: none.
      coming: page lists [B, K, C] and keys of the tokens that follow, for codecs that look ahead.
    """
    pos = jnp.broadcast_to(new.pos[:, None, :], list_id.shape)
    return store(pages, codec, chooser, list_id, new.k, new.v, pos, new.meta, hole, coming)


def store(
    pages: Pages,
    codec: Codec,
    chooser: Summariser,
    list_id: Int[Array, "B K T"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B K T"],
    meta: dict[str, Float[Array, "B K T"]],
    hole: Int[Array, "B K T"] | None = None,
    coming: tuple[Array, Array] | None = None,
) -> Pages:
    """``append`` of tokens that need not be the same in all KV heads."""
    want = _of_lists(pages, list_id)
    longer = want if hole is None else want & (hole < 0)[..., None]
    pages, grown = _take_pages(pages, longer.sum(axis=2), k.shape[2])
    index = _appended(pages.length, want, longer)
    index = index if hole is None else jnp.where(hole >= 0, hole, index)
    page, slot = _place(pages, list_id, index)
    if coming is None:
        pages = codec.write(pages, page, slot, k, v)
    else:
        later = _of_lists(pages, coming[0])
        place = _place(pages, coming[0], _appended(grown, later, later))
        pages = codec.write(pages, page, slot, k, v, Coming(*place, coming[1]))
    pages = dataclasses.replace(
        pages,
        pos=pages.pos.at[page, slot].set(pos, **DROP),
        meta={
            name: old.at[page, slot].set(meta[name].astype(old.dtype), **DROP)
            for name, old in pages.meta.items()
        },
        length=grown,
    )
    return _summarise(pages, codec, chooser, page if page.shape[2] == 1 else None)


def _of_lists(pages: Pages, list_id: Int[Array, "B K T"]) -> Bool[Array, "B K T R"]:
    """Which list each token goes to."""
    return list_id[..., None] == jnp.arange(pages.length.shape[2])


def _appended(
    length: Int[Array, "B K R"], want: Bool[Array, "B K T R"], longer: Bool[Array, "B K T R"]
) -> Int[Array, "B K T"]:
    """List index of each token, in its own list; those that make a list ``longer`` follow each other."""
    return ((length[:, :, None, :] + jnp.cumsum(longer, axis=2) - 1) * want).sum(axis=-1)


def _place(pages: Pages, list_id: Int[Array, "B K T"], index: Int[Array, "B K T"]) -> tuple[Array, Array]:
    """Page and slot of these list indices; tokens without a list are out of range, so dropped by scatters."""
    entry, slot = split(index, pages.size)
    page = _page_at(pages, jnp.maximum(list_id, 0), entry)
    return jnp.where(list_id >= 0, page, pages.count), slot


def _take_pages(pages: Pages, extra: Int[Array, "B K R"], most: int) -> tuple[Pages, Array]:
    """Give every list the pages that ``extra`` (at most ``most``) more tokens need; new lengths.

    The j-th new page of the i-th list is the one ``before[i] + j`` below the top of the free stack.
    """
    size, entries = pages.size, pages.table.shape[-1]
    have = used(pages)
    need = blocks(pages.length + extra, size) - have
    flat = need.reshape(-1)
    before = (jnp.cumsum(flat) - flat).reshape(need.shape)
    j = jnp.arange(-(-most // size))
    at = pages.n_free - 1 - (before[..., None] + j)
    entry = have[..., None] + j
    granted = (j < need[..., None]) & (at >= 0) & (entry < entries)
    ids = jnp.where(granted, there(pages.free, jnp.maximum(at, 0)), pages.count)
    b, k = _streams(pages)
    r = jnp.arange(need.shape[2])[:, None]
    entry = jnp.where(granted, entry, entries)
    table = pages.table.at[b[..., None], k[..., None], r, entry].set(ids, **DROP)
    short = jnp.any((j < need[..., None]) & ~granted)
    total = flat.sum()
    pages = dataclasses.replace(
        pages,
        table=table,
        refs=pages.refs.at[ids].add(1, **DROP),
        # A page starts its life with scale zero: the first token sets it.
        scales=jax.tree.map(lambda x: x.at[ids].set(0, **DROP), pages.scales),
        n_free=jnp.maximum(pages.n_free - total, 0),
        overflow=pages.overflow | short,
    )
    return pages, pages.length + extra


def _streams(pages: Pages) -> tuple[Array, Array]:
    """Row and head indices of shape [B, 1, 1] and [1, K, 1]."""
    rows, heads = pages.table.shape[:2]
    return jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None]


def _page_at(pages: Pages, list_id: Array, entry: Array) -> Array:
    """Pool page that is entry ``entry`` of list ``list_id``; out of range when there is none."""
    entries = pages.table.shape[-1]
    b, k = _streams(pages)
    page = there(pages.table, b, k, list_id, jnp.minimum(entry, entries - 1))
    return jnp.where((entry < entries) & (page >= 0), page, pages.count)


def _summarise(pages: Pages, codec: Codec, chooser: Summariser, touched: Array | None) -> Pages:
    """Recompute the summaries of the touched pages (of all, when None) from what they hold now."""
    if not pages.summary:
        return pages
    page = jnp.arange(pages.count) if touched is None else touched.reshape(-1)
    slot = jnp.arange(pages.size)
    k, _ = codec.read(pages, jnp.minimum(page, pages.count - 1)[:, None], slot[None, :])
    fill = there(fills(pages), jnp.minimum(page, pages.count - 1))
    fresh = chooser.summarise(k, slot[None, :] < fill[:, None])
    return dataclasses.replace(
        pages,
        summary={n: scattered(old, (page,), fresh[n]) for n, old in pages.summary.items()},
    )


def fills(pages: Pages) -> Int[Array, " P"]:
    """Live slots of every page of the pool; 0 for free pages."""
    entries = pages.table.shape[-1]
    fill = jnp.clip(pages.length[..., None] - jnp.arange(entries) * pages.size, 0, pages.size)
    ids = jnp.where((pages.table >= 0) & (fill > 0), pages.table, pages.count)
    return jnp.zeros(pages.count, jnp.int32).at[ids].set(fill, **DROP)


# --- looking -------------------------------------------------------------------------------------


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of every KV head, gathered into one line per KV head (its lists one after the other).

    Attributes:
      pos: true positions; EMPTY in dead slots.
      live: does the slot hold a token?
      meta: the policy part's values (anything in dead slots).
      seen: tokens that each row has seen; None where slots are not ranked.
    """

    pos: Int[Array, "B K C"]
    live: Bool[Array, "B K C"]
    meta: dict[str, Float[Array, "B K C"]]
    seen: Int[Array, "B 1 1"] | None = None


def slots(pages: Pages) -> Slots:
    """Positions and metadata per KV head; C = R * M * S, no keys or values are read."""
    rows, heads, lists, entries = pages.table.shape
    index = jnp.arange(entries * pages.size).reshape(entries, pages.size)
    live = (index < pages.length[..., None, None]).reshape(rows, heads, -1)
    ids = jnp.maximum(pages.table, 0)
    flat = (rows, heads, lists * entries * pages.size)
    return Slots(
        pos=jnp.where(live, there(pages.pos, ids).reshape(flat), EMPTY),
        live=live,
        meta={name: there(value, ids).reshape(*flat, *value.shape[2:]) for name, value in pages.meta.items()},
    )


def with_meta(pages: Pages, values: dict[str, Float[Array, "B K C"]]) -> Pages:
    """New per-slot values of owned pages, along the lines of ``slots``."""
    entries = pages.table.shape[-1]
    owned = jnp.arange(entries) < used(pages)[..., None]
    ids = jnp.where(owned, pages.table, pages.count)  # out of range: dropped
    shape = (*pages.table.shape, pages.size)
    new = {n: pages.meta[n].at[ids].set(x.reshape(shape), **DROP) for n, x in values.items()}
    return dataclasses.replace(pages, meta=pages.meta | new)


# --- removing ------------------------------------------------------------------------------------


def remove(pages: Pages, codec: Codec, chooser: Summariser, victim: Int[Array, "B K"]) -> Pages:
    """Free one slot of each KV head: ``victim`` counts along the lines of ``slots``; EMPTY frees nothing.

    The list's last token moves into the hole, and a page emptied by that returns to the pool.
    """
    hit = (victim >= 0)[..., None]  # [B, K, 1]
    list_id, hole = split(jnp.maximum(victim, 0)[..., None], pages.span)
    length = along(pages.length, list_id, axis=2)
    last = jnp.maximum(length - 1, 0)
    (entry, slot), (of_hole, hole_slot) = split(last, pages.size), split(hole, pages.size)
    source, target = _page_at(pages, list_id, entry), _page_at(pages, list_id, of_hole)
    moves = hit & (hole != last)
    pages = _move(pages, codec, source, slot, jnp.where(moves, target, pages.count), hole_slot)
    emptied = hit & (slot == 0)
    pages = _give_back(pages, list_id, entry, jnp.where(emptied, source, pages.count))
    b, k = _streams(pages)
    shorter = jnp.where(hit, last, length)
    pages = dataclasses.replace(pages, length=pages.length.at[b, k, list_id].set(shorter, **DROP))
    return _summarise(pages, codec, chooser, jnp.concatenate([target, source], axis=-1))


def _move(pages: Pages, codec: Codec, source: Array, at: Array, target: Array, hole: Array) -> Pages:
    """Copy slot ``at`` of page ``source`` over slot ``hole`` of page ``target``; keys, values, everything."""
    clip = jnp.minimum(source, pages.count - 1)
    k, v = codec.read(pages, clip, at)
    pages = codec.write(pages, target, hole, k, v)

    def moved(x: Array) -> Array:
        return x.at[target, hole].set(there(x, clip, at), **DROP)

    return dataclasses.replace(
        pages, pos=moved(pages.pos), meta={name: moved(x) for name, x in pages.meta.items()}
    )


def retain(pages: Pages, codec: Codec, chooser: Summariser, keep: Bool[Array, "B K C"]) -> Pages:
    """Free every slot that is not kept; ``keep`` goes along the lines of ``slots``, dead slots are ignored.

    The j-th hole below a list's new length takes the j-th kept slot above it, and pages emptied by that
    return to the pool. A list of S = 4 of which four stay:

      before   page 7 [a x c x]   page 2 [x f g .]      holes 1 and 3, sources 5 and 6
      after    page 7 [a f c g]   page 2 returns to the pool
    """
    rows, heads, lists, entries = pages.table.shape
    span = entries * pages.size
    at = jnp.arange(span)
    keep = keep.reshape(rows, heads, lists, span) & (at < pages.length[..., None])
    length = keep.sum(axis=-1)
    inside = at < length[..., None]
    pages = _fill(pages, codec, _places(~keep & inside), _places(keep & ~inside))
    entry = jnp.arange(entries)
    emptied = (entry >= blocks(length, pages.size)[..., None]) & (entry < used(pages)[..., None])
    gone = jnp.where(emptied, pages.table, pages.count).reshape(rows, heads, -1)
    list_id = jnp.repeat(jnp.arange(lists), entries)
    pages = _give_back(pages, list_id, jnp.tile(entry, lists), gone)
    return _summarise(dataclasses.replace(pages, length=length), codec, chooser, None)


MOVES = 16
"""Slots of a list that ``retain`` moves together: its cost follows the holes, not the lists."""


def _places(there: Bool[Array, "B K R Z"]) -> Int[Array, "B K R J"]:
    """Indices of what is there, in order, and Z behind the last; half of all can be holes, in whole MOVES."""
    span = there.shape[-1]
    most = -(-span // (2 * MOVES)) * MOVES
    order = jnp.sort(jnp.where(there, jnp.arange(span), span), axis=-1)[..., :most]
    return jnp.pad(order, [(0, 0)] * 3 + [(0, most - order.shape[-1])], constant_values=span)


def _fill(pages: Pages, codec: Codec, hole: Int[Array, "B K R J"], source: Int[Array, "B K R J"]) -> Pages:
    """Move the j-th source of every list into its j-th hole; an index beyond the list moves nothing."""
    rows, heads, lists, entries = pages.table.shape
    list_id = jnp.repeat(jnp.arange(lists), MOVES)
    holes = (hole < entries * pages.size).sum(axis=-1).max()

    def some(carry: tuple[Array, Pages]) -> tuple[Array, Pages]:
        begin, pages = carry
        pairs = (jax.lax.dynamic_slice_in_dim(x, begin, MOVES, axis=3) for x in (hole, source))
        (to, into), (start, at) = (split(x.reshape(rows, heads, -1), pages.size) for x in pairs)
        target, origin = _page_at(pages, list_id, to), _page_at(pages, list_id, start)
        return begin + MOVES, _move(pages, codec, origin, at, target, into)

    return jax.lax.while_loop(lambda carry: carry[0] < holes, some, (jnp.asarray(0), pages))[1]


def _give_back(pages: Pages, list_id: Array, entry: Array, page: Array) -> Pages:
    """Return each KV head's ``page`` (out of range: none) to the pool and strike it from its list."""
    entries = pages.table.shape[-1]
    flat = page.reshape(-1)
    gone = flat < pages.count
    top = pages.n_free + jnp.cumsum(gone) - 1
    entry = jnp.where(page < pages.count, entry, entries)
    b, k = _streams(pages)
    return dataclasses.replace(
        pages,
        table=pages.table.at[b, k, list_id, entry].set(EMPTY, **DROP),
        refs=pages.refs.at[flat].add(-1, **DROP),
        free=pages.free.at[jnp.where(gone, top, pages.count)].set(flat, **DROP),
        n_free=pages.n_free + gone.sum(),
    )


def without_first(pages: Pages, gone: Int[Array, "B K"]) -> Pages:
    """The last list without its first ``gone`` pages, all of them full; the others move up."""
    (_, _, lists, entries), entry = pages.table.shape, jnp.arange(pages.table.shape[3])
    freed = jnp.where(entry < gone[..., None], pages.table[:, :, -1], pages.count)
    pages = _give_back(pages, jnp.asarray(lists - 1), entry, freed)
    later = jnp.minimum(entry + gone[..., None], entries - 1)
    left = jnp.where(entry + gone[..., None] < entries, along(pages.table[:, :, -1], later, axis=-1), EMPTY)
    return dataclasses.replace(
        pages,
        table=pages.table.at[:, :, -1].set(left),
        length=pages.length.at[:, :, -1].add(-gone * pages.size),
    )


def clear(pages: Pages, gone: Bool[Array, " B"]) -> Pages:
    """The chosen rows own nothing any more (finished requests); pages without an owner return to the pool."""
    entries = pages.table.shape[-1]
    owned = (jnp.arange(entries) < used(pages)[..., None]) & gone[:, None, None, None]
    flat = jnp.where(owned, pages.table, pages.count).reshape(-1)
    refs = pages.refs.at[flat].add(-1, **DROP)
    # The lowest page is on top: what comes next lies together, and a read can skip the rest of the pool.
    ids = jnp.arange(pages.count)[::-1]
    free = refs[ids] == 0
    return dataclasses.replace(
        pages,
        table=jnp.where(gone[:, None, None, None], EMPTY, pages.table),
        length=jnp.where(gone[:, None, None], 0, pages.length),
        refs=refs,
        free=pages.free.at[jnp.where(free, jnp.cumsum(free) - 1, pages.count)].set(ids, **DROP),
        n_free=jnp.full_like(pages.n_free, free.sum()),
    )
