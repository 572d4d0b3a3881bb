"""Rows of a running batch: one comes in from a state of its own, goes, or is copied out.

  insert    a row that was read alone enters an empty batch row: ring, pages, metadata, φ; pages at the
            beginning of its lists may be lent by a row that holds the same
  release   rows leave; pages without another owner are free when it returns
  cut       one row as a state of its own, with pages of its own
  shortened one row as it was after fewer tokens, where everything was kept

All are pure and have one program for each pair of pool sizes, whichever row and whatever it holds; jitted
with the running batch donated they write in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.cache.write import DROP, scattered
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import WHOLE, of_state
from kvjax.types import EMPTY, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loan:
    """Pages that a row shares with another, which holds the same tokens in them.

    Attributes:
      row: the row that lends them.
      pages: how many at the beginning of each list, of each pool in turn; full pages, which are never
        written again.
    """

    row: Int[Array, ""]
    pages: tuple[Int[Array, "K R"], ...]


def on_devices(verb: Callable[..., LayerCache]) -> Callable[..., LayerCache]:
    """``insert``, ``release`` or ``cut`` on a mesh whose devices have heads of all rows: each does its own.

    Takes the mesh, and the sizes of ``cut``, by name; these count a device's pages.
    """

    def call(cache: LayerCache, *arguments: Any, mesh: Mesh, **static: Any) -> LayerCache:
        if mesh == ONE:
            return verb(cache, *arguments, **static)
        present = [x for x in arguments if x is not None]
        run, specs = functools.partial(verb, **static), of_state(cache)
        named = [of_state(x) if isinstance(x, LayerCache) else WHOLE for x in present]
        return mesh.each(run, (cache, *present), (specs, *named), specs)  # type: ignore[no-any-return]

    return call


def insert(
    cache: LayerCache, source: LayerCache, row: Int[Array, ""], loan: Loan | None = None
) -> LayerCache:
    """A layer with the only row of ``source`` at ``row``, which must be empty.

    Args:
      cache: of the running batch.
      source: made under the same structure, with rings and pages of the same size; its page lists may be
        longer or shorter than the batch's. Where a list or the pool is too short ``overflow`` is set.
      row: its place.
      loan: pages that are not copied; None copies all.
    """

    def place(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), row, axis=0)

    pools = [
        _insert_pages(pages, theirs, row, None if loan is None else (loan.row, loan.pages[at]))
        for at, (pages, theirs) in enumerate(zip(cache.pools, source.pools))
    ]
    return dataclasses.replace(
        cache,
        ring=jax.tree.map(place, cache.ring, source.ring),
        summary=jax.tree.map(place, cache.summary, source.summary),
    ).with_pools(pools)


def _insert_pages(
    pages: Pages, source: Pages, row: Int[Array, ""], loan: tuple[Array, Array] | None
) -> Pages:
    """Every owned page of the source is lent, or gets a free one of the pool; the rest is a renaming."""
    entries, theirs = pages.table.shape[-1], source.table.shape[-1]
    owned = jnp.arange(theirs) < paging.used(source)[0][..., None]  # [K, R, M]
    copied, lent = owned, jnp.zeros_like(owned)
    if loan is not None:
        lent = owned & (jnp.arange(theirs) < loan[1][..., None])
        copied = owned & ~lent
    names = jnp.where(copied, source.table[0], source.count)
    taken = jnp.zeros(source.count, bool).at[names.reshape(-1)].set(True, **DROP)
    at = pages.n_free - jnp.cumsum(taken)  # the i-th owned page takes the i-th from the top of the stack
    fresh = jnp.where(taken & (at >= 0), pages.free[jnp.maximum(at, 0)], pages.count)
    table = jnp.where(copied, fresh[jnp.minimum(names, source.count - 1)], EMPTY)[..., :entries]
    table = jnp.pad(table, ((0, 0), (0, 0), (0, max(0, entries - theirs))), constant_values=EMPTY)
    refs = pages.refs.at[fresh].add(1, **DROP)
    if loan is not None:
        lent = jnp.pad(lent[..., :entries], ((0, 0), (0, 0), (0, max(0, entries - theirs))))
        table = jnp.where(lent, pages.table[loan[0]], table)
        refs = refs.at[jnp.where(lent, table, pages.count)].add(1, **DROP)
    total = taken.sum()
    lost = (total > pages.n_free) | owned[..., entries:].any() | source.overflow

    def carry(old: Any, new: Any) -> Array:
        return scattered(old, (fresh,), new)  # pages nobody owns go out of range

    return dataclasses.replace(
        pages,
        k=carry(pages.k, source.k),
        v=carry(pages.v, source.v),
        scales=jax.tree.map(carry, pages.scales, source.scales),
        pos=carry(pages.pos, source.pos),
        meta={name: carry(x, source.meta[name]) for name, x in pages.meta.items()},
        summary={name: carry(x, source.summary[name]) for name, x in pages.summary.items()},
        table=pages.table.at[row].set(table),
        length=pages.length.at[row].set(source.length[0]),
        refs=refs,
        n_free=jnp.maximum(pages.n_free - total, 0),
        overflow=pages.overflow | lost,
    )


def release(cache: LayerCache, gone: Bool[Array, " B"]) -> LayerCache:
    """A layer whose rows ``gone`` hold nothing: their pages are back in the pool.

    Rings and φ need no clearing: what a row sees of its ring follows from its length, and ``insert`` writes
    all of both.
    """
    return cache.with_pools([paging.clear(pages, gone) for pages in cache.pools])


def cut(cache: LayerCache, row: Int[Array, ""], sizes: Sequence[int]) -> LayerCache:
    """One row of a layer, in pools of so many pages; they must hold what it owns."""
    index = row[None]
    return dataclasses.replace(
        cache,
        ring=rings.rows(cache.ring, index),
        summary=jax.tree.map(lambda x: x[index], cache.summary),
    ).with_pools([pool.pick_rows(pages, index, size) for pages, size in zip(cache.pools, sizes)])


def shortened(cache: LayerCache, seen: Int[Array, " 1"], tokens: Int[Array, ""], count: int) -> LayerCache:
    """A layer of one row as it was after its first ``tokens`` of ``seen``, in a pool of ``count`` pages.

    The layer holds every token in the order of positions, exact, and nothing beside keys and values. Ring
    slots take back from the pages what had left the window later.
    """
    assert cache.pages is not None
    ring, pages = cache.ring, cache.pages
    positions = rings.positions(tokens[None], ring.window)[0]  # of slots then; EMPTY where there was nothing
    held = positions >= seen[0] - ring.window  # still in the ring, in the same slot
    at = jnp.clip(positions, 0)
    page, slot = (
        pages.table[0, :, 0, :][:, jnp.minimum(at // pages.size, pages.table.shape[-1] - 1)],
        at % pages.size,
    )

    def back(own: Array, paged: Array) -> Array:
        return jnp.where(held[:, None], own[0], paged[jnp.maximum(page, 0), slot])[None]

    ring = dataclasses.replace(ring, k=back(ring.k, pages.k), v=back(ring.v, pages.v))
    left = jnp.minimum(pages.length, jnp.maximum(tokens - ring.window, 0))
    pages = pool.pick_rows(dataclasses.replace(pages, length=left), jnp.zeros(1, jnp.int32), count)
    return dataclasses.replace(cache, ring=ring, pages=pages)


def with_row(state: KVState, layers: tuple[LayerCache, ...], source: KVState, row: Any) -> KVState:
    """The state with these layers, and the counts of the source's only row at ``row``."""

    def place(old: Any, new: Any) -> Any:
        return None if old is None else old.at[row].set(new[0])

    return dataclasses.replace(
        state,
        layers=layers,
        length=place(state.length, source.length),
        total=place(state.total, source.total),
        confidence=place(state.confidence, source.confidence),
    )


def without_rows(state: KVState, layers: tuple[LayerCache, ...], gone: Bool[Array, " B"]) -> KVState:
    """The state with these layers, its rows ``gone`` at their beginning."""
    keep = ~gone
    return dataclasses.replace(
        state,
        layers=layers,
        length=state.length * keep,
        total=state.total * keep,
        confidence=None if state.confidence is None else state.confidence * keep,
    )
