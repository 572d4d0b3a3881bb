"""Reads of tokens in host memory: units that were chosen, or blocks of a list.

Why: kvjax/DESIGN.md, 39.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on

from kvjax.cache.hosted import IN_HOST, Cached, Hosted, as_bits, as_stored
from kvjax.cache.pages import Pages
from kvjax.cache.write import DROP, along, split, there
from kvjax.types import EMPTY

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Num

BROUGHT = 8
"""Units that are brought at a time, of those that a read misses."""

COPIED = 4096
"""Bytes from which a unit is worth a copy of its own."""


def brought(x: Num[Array, "C ..."], first: Int[Array, " J"], size: int) -> Num[Array, "J U ..."]:
    """``size`` slots from each of these, on the device.

    A few large units are copied straight from where they lie, each by itself. Small ones, or many, are
    gathered by the host's cores and sent in one copy.
    """
    space = jax.memory.Space
    if size * math.prod(x.shape[1:]) * x.dtype.itemsize >= COPIED and len(first) <= BROUGHT:
        each = [jax.lax.dynamic_slice_in_dim(x, at, size) for at in first]
        return jnp.stack([jax.device_put(unit, space.Device) for unit in each])

    @compute_on("device_host")
    @jax.jit
    def gathered(x: Array, first: Array) -> Array:
        dims = jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(range(1, x.ndim + 1)), collapsed_slice_dims=(), start_index_map=(0,)
        )
        sizes = (size, *x.shape[1:])
        return jax.lax.gather(x, first[:, None], dims, sizes, mode="promise_in_bounds")

    return jax.device_put(gathered(x, jax.device_put(first, space.Host)), space.Device)


def filled_in(
    hosted: Hosted, first: Int[Array, " J"], wanted: Bool[Array, " J"], held: tuple[Array, ...]
) -> tuple[Array, ...]:
    """k, v [J, U, X] and pos [J, U] with those that are ``wanted`` from host memory, ``BROUGHT`` at a time.

    Args:
      hosted: the pages.
      first: the first slot of each.
      wanted: which are brought.
      held: what the others are.
    """
    most, size = len(first), held[2].shape[1]
    order = jnp.argsort(~wanted, stable=True)
    order = jnp.pad(order, (0, -most % BROUGHT))
    count = wanted.sum()

    def some(carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        begin, held = carry
        at = jax.lax.dynamic_slice_in_dim(order, begin, BROUGHT)
        late = begin + jnp.arange(BROUGHT) >= count
        got = [brought(getattr(hosted, name), there(first, at), size) for name in IN_HOST]
        at = jnp.where(late, most, at)
        return begin + BROUGHT, tuple(x.at[at].set(y, **DROP) for x, y in zip(held, got))

    begin = jnp.zeros((), count.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] < count, some, (begin, held))[1]


def as_pages(hosted: Hosted, like: Pages) -> Pages:
    """The hosted pages as a selection ranks them: what lies in host memory is not there."""
    gone: dict[str, Any] = dict.fromkeys(("v", "pos", "refs", "free", "n_free", "overflow"))
    return dataclasses.replace(
        like,
        **gone | {"k": hosted.keys},
        meta={},
        scales=hosted.scales if hosted.index is None else hosted.key_scales,
        summary=hosted.summary,
        table=hosted.table[:, :, None],
        length=(hosted.owned * like.size)[:, :, None],
    )


def units(
    hosted: Hosted, pages: Pages, entries: Int[Array, "B K J"]
) -> tuple[Pages, Bool[Array, "B K J U"], Hosted]:
    """The chosen units in the order of the choice; they are read from where they are.

    Args:
      hosted: the pages whose units come first.
      pages: those that go on; a list of theirs, the last.
      entries: indices of units, of the hosted pages and then of the others; EMPTY for none.

    Returns:
      A pool whose page [B K J] is a unit; which of its slots are visited; and the pages with what was
      brought in the device's cache.
    """
    (rows, heads, _), near, unit = entries.shape, hosted.cached, hosted.cached.unit
    per, count = pages.size // unit, hosted.table.shape[2] * pages.size // unit
    there_is, open_ = entries >= 0, entries >= count
    own = jnp.clip(entries - count, 0)
    far = jnp.where(there_is & ~open_, entries, 0)

    def page_of(table: Array, index: Array) -> tuple[Array, Array]:
        """Page of each unit, and which of its units it is."""
        entry, part = split(index, per)
        return jnp.maximum(along(table, entry, axis=-1), 0), part

    own_page, own_part = page_of(pages.table[:, :, -1], own)
    far_page, far_part = page_of(hosted.table, far)
    slot = jnp.where(there_is & ~open_, along(near.place, far, axis=-1), EMPTY)
    here, asked = slot >= 0, there_is & ~open_
    missing = asked & ~here
    b, k = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    cached = jnp.maximum(slot, 0)

    def held(of_pages: Array, of_cache: Array, bits: bool) -> Array:
        flat = of_pages.reshape(-1, unit, *of_pages.shape[2:])
        mine = there(flat, own_page * per + own_part)
        mine = as_bits(mine) if bits else mine
        wide = open_.reshape(*open_.shape, *[1] * (mine.ndim - 3))
        return jnp.where(wide, mine, there(of_cache, b, k, cached))

    now = (held(pages.k, near.k, True), held(pages.v, near.v, True), held(pages.pos, near.pos, False))
    flat = tuple(x.reshape(-1, *x.shape[3:]) for x in now)
    far_first = hosted.first_slot(far_page) + far_part * unit
    flat = filled_in(hosted, far_first.reshape(-1), missing.reshape(-1), flat)
    kept = _remembered(near, far, slot, missing, asked, tuple(x.reshape(y.shape) for x, y in zip(flat, now)))

    def of_page(mine: Array, others: Array) -> Array:
        wide = open_.reshape(*open_.shape, *[1] * (mine.ndim - 1))
        return jnp.where(wide, there(mine, own_page), there(others, far_page)).reshape(-1, *mine.shape[1:])

    pool = _pool_of(pages, flat, jax.tree.map(of_page, pages.scales, hosted.scales))
    last = own[..., None] * unit + jnp.arange(unit)
    full = last < pages.length[:, :, -1, None, None]
    live = there_is[..., None] & (full | ~open_[..., None])
    return pool, live, dataclasses.replace(hosted, cached=kept)


def _remembered(
    near: Cached,
    unit: Int[Array, "B K J"],
    slot: Int[Array, "B K J"],
    missing: Bool[Array, "B K J"],
    asked: Bool[Array, "B K J"],
    got: tuple[Array, ...],
) -> Cached:
    """The cache after a read: what was missing takes the places that were used least recently."""
    (rows, heads, places), most = near.holds.shape, unit.shape[-1]
    b, k = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    now = near.clock + 1
    used = near.used.at[b, k, jnp.where(slot >= 0, slot, places)].set(now[..., None], **DROP)
    # A read asks for no more units than there are places, so none that was just read is among these.
    oldest = jax.lax.top_k(-used, min(most, places))[1]
    rank = jnp.minimum(jnp.cumsum(missing, axis=-1) - 1, oldest.shape[-1] - 1)
    target = jnp.where(missing, along(oldest, jnp.maximum(rank, 0), axis=-1), places)
    before = along(near.holds, jnp.minimum(target, places - 1), axis=-1)
    beyond = near.place.shape[-1]
    gone = jnp.where(missing & (before >= 0), before, beyond)
    place = near.place.at[b, k, gone].set(EMPTY, **DROP)
    place = place.at[b, k, jnp.where(missing, unit, beyond)].set(target, **DROP)
    stored = [x.at[b, k, target].set(y, **DROP) for x, y in zip((near.k, near.v, near.pos), got)]
    return Cached(
        k=stored[0],
        v=stored[1],
        pos=stored[2],
        holds=near.holds.at[b, k, target].set(unit, **DROP),
        place=place,
        used=used.at[b, k, target].set(now[..., None], **DROP),
        clock=now,
        asked=near.asked + asked.sum(axis=-1),
        hits=near.hits + (slot >= 0).sum(axis=-1),
    )


def block(hosted: Hosted, pages: Pages, begin: Int[Array, ""], count: int) -> tuple[Pages, Int[Array, "B K"]]:
    """``count`` pages of every KV head from entry ``begin`` of its list on, and the live slots in them.

    Returns:
      A pool of these pages, [B K count], on the device.
    """
    rows, heads = hosted.owned.shape
    entry = jnp.broadcast_to(begin + jnp.arange(count), (rows, heads, count))
    behind = entry - hosted.owned[..., None]
    entries = hosted.table.shape[2]
    far = jnp.maximum(along(hosted.table, jnp.minimum(entry, entries - 1), axis=-1), 0)
    own = jnp.maximum(along(pages.table[:, :, -1], jnp.clip(behind, 0, entries - 1), axis=-1), 0)
    is_far = behind < 0

    def mine(x: Array, bits: bool) -> Array:
        x = there(x, own.reshape(-1))
        return as_bits(x) if bits else x

    held = (mine(pages.k, True), mine(pages.v, True), mine(pages.pos, False))
    flat = filled_in(hosted, hosted.first_slot(far).reshape(-1), is_far.reshape(-1), held)

    def of_page(mine: Array, others: Array) -> Array:
        wide = is_far.reshape(-1, *[1] * (mine.ndim - 1))
        return jnp.where(wide, there(others, far.reshape(-1)), there(mine, own.reshape(-1)))

    length = hosted.owned * pages.size + pages.length[:, :, -1]
    pool = _pool_of(pages, flat, jax.tree.map(of_page, pages.scales, hosted.scales))
    return pool, jnp.clip(length - begin * pages.size, 0, count * pages.size)


def _pool_of(like: Pages, held: tuple[Array, ...], scales: Any) -> Pages:
    """A pool to read: its slots (k, v, pos) as host memory has them; nobody writes it."""
    nothing: dict[str, Any] = dict.fromkeys(("refs", "free", "n_free", "overflow"))
    return dataclasses.replace(
        like,
        k=as_stored(held[0], like.k.dtype),
        v=as_stored(held[1], like.v.dtype),
        pos=held[2],
        scales=scales,
        meta={},
        summary={},
        **nothing,
    )


def positions(hosted: Hosted) -> Int[Array, "B K C"]:
    """True positions of all hosted tokens; EMPTY beyond the last."""
    first = hosted.first_slot(jnp.maximum(hosted.table, 0))
    pos = brought(hosted.pos, first.reshape(-1), hosted.size).reshape(*first.shape, hosted.size)
    return jnp.where((hosted.table >= 0)[..., None], pos, EMPTY).reshape(*first.shape[:2], -1)
