"""The whole state: three rooms a layer, and how many tokens each row has seen."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Ring
from kvjax.types import pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's rooms.

    Attributes:
      ring: the newest W tokens.
      pages: GLOBAL, or None where nothing can outlive the window.
      summary: the completion part's φ, any pytree with leading axis B, or None.
    """

    ring: Ring
    pages: Pages | None
    summary: Any


@pytree(static=("context", "chunk"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVState:
    """Everything a batch of sequences remembers.

    Attributes:
      layers: one ``LayerCache`` per layer.
      length: tokens each row has seen; the next token's position.
      total: prompt length of each row.
      peak: most bytes so far (live, allocated), taken before pools shrink, after each layer of a
        whole-prompt prefill (the layer's uncompressed keys and values included), and at the end.
      context: most tokens a row may ever see.
      chunk: most tokens of a row that may arrive at a time.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]
    total: Int[Array, " B"]
    peak: Float[Array, " 2"]
    context: int
    chunk: int

    @property
    def rows(self) -> int:
        """B."""
        return self.length.shape[0]


class PoolOverflowError(RuntimeError):
    """A pool or a page list was too small: a fault of the reservation, never of the user."""


@jax.jit
def _page_counts(state: KVState) -> dict[str, Array]:
    paged = [layer.pages for layer in state.layers if layer.pages is not None]
    if not paged:
        return {}
    return {
        "used": jnp.stack([p.count - p.n_free for p in paged]),
        "overflow": jnp.stack([p.overflow for p in paged]),
        "slots": jnp.stack([p.length.sum() for p in paged]),
    }


def counts(state: KVState) -> dict[str, np.ndarray]:
    """Owned pages, live slots and overflow flags of the paged layers, read from the device in one go.

    Raises:
      PoolOverflowError: a token was lost.
    """
    found: dict[str, np.ndarray] = jax.device_get(_page_counts(state))
    if found and found["overflow"].any():
        raise PoolOverflowError(
            f"layers {np.flatnonzero(found['overflow']).tolist()} ran out of pages. Reserve more before the "
            "segment."
        )
    return found


def reserve(
    state: KVState, tokens: int, most: int | None, *, ahead: int = 0, doubling: bool = False
) -> KVState:
    """Grow pools until ``tokens`` more tokens a row fit whatever is admitted (host side, reads page counts).

    Args:
      state: the state; pools that need not grow keep their buffers.
      tokens: tokens a row about to come.
      most: the most slots a stream can ever own, or None.
      ahead: a pool that must grow makes room for this many tokens, so that not every segment of a long
        answer meets a new size and a compilation.
      doubling: a pool that must grow at least doubles, for the same reason; for prefill, after which
        ``fit`` gives the excess back.
    """
    found = counts(state)
    if not found:
        return state
    rooms, held = _paged(state), [int(n) for n in found["slots"]]
    needs = [_pages_for(room, n, tokens, most) for room, n in zip(rooms, held)]
    if all(need <= room.count for need, room in zip(needs, rooms)):
        return state
    wants = [_pages_for(room, n, max(tokens, ahead), most) for room, n in zip(rooms, held)]
    if doubling:
        wants = [max(want, min(2 * room.count, 2 * want)) for want, room in zip(wants, rooms)]
    # Layers within one class of the fullest take its class: which layer is a page fuller than its neighbour
    # depends on the text, and every combination of sizes would be a program of its own.
    streams = max(room.table[..., 0].size for room in rooms)
    coming = streams * -(-max(tokens, ahead) // min(room.size for room in rooms))
    shared = pool.class_for(max(wants), coming)
    own = [pool.class_for(want, coming) for want in wants]
    grown = [shared if 2 * shared <= 3 * size else size for size in own]
    # A bound that is known is taken exactly.
    bounds = [_most_pages(room, most) for room in rooms]
    grown = [size if bound is None else min(size, bound) for size, bound in zip(grown, bounds)]
    wanted = [max(size, room.count) for size, room in zip(grown, rooms)]
    return _resized(state, tuple(wanted))


def _pages_for(pages: Pages, held: int, tokens: int, most: int | None) -> int:
    """Pages that suffice for ``held`` slots and ``tokens`` more a row, however they lie in the lists.

    Counted from slots, not from owned pages: how a ragged budget spreads a fixed number of slots over its
    heads depends on the text, and the size must not.
    """
    rows, heads, lists, _ = pages.table.shape
    need = held // pages.size + rows * heads * lists * (-(-tokens // pages.size) + 1)
    bound = _most_pages(pages, most)
    return need if bound is None else min(need, bound)


def _most_pages(pages: Pages, most: int | None) -> int | None:
    """Pages that suffice when no stream can ever own more than ``most`` slots."""
    if most is None:
        return None
    rows, heads, lists, _ = pages.table.shape
    # Two lists split one stream's slots and may each end in a page of their own.
    return rows * heads * (-(-most // pages.size) + lists - 1)


def fit(state: KVState) -> KVState:
    """Shrink every pool to the smallest size class that holds its owned pages."""
    found = counts(state)
    return _resized(state, tuple(pool.size_class(max(1, int(n))) for n in found["used"])) if found else state


def _paged(state: KVState) -> list[Pages]:
    return [layer.pages for layer in state.layers if layer.pages is not None]


_resize = jax.jit(pool.resize, static_argnums=1)


def _resized(state: KVState, sizes: tuple[int, ...]) -> KVState:
    """The state with the paged layers' pools at these sizes; untouched pools keep their buffers."""
    size = iter(sizes)
    layers = []
    for layer in state.layers:
        if layer.pages is not None:
            want = next(size)
            if want != layer.pages.count:
                layer = dataclasses.replace(layer, pages=_resize(layer.pages, want))
        layers.append(layer)
    return dataclasses.replace(state, layers=tuple(layers))


def fork(state: KVState, row: int, n: int) -> KVState:
    """n rows, each a copy of ``row``: several continuations of one compressed context.

    Pages are copied, so every page keeps exactly one owner.

    Raises:
      IndexError: no such row.
      ValueError: n < 1.
    """
    if not 0 <= row < state.rows:
        raise IndexError(
            f"fork(row={row}) asks for a row of a state that has {state.rows}. Rows count from 0."
        )
    if n < 1:
        raise ValueError(f"fork(n={n}) makes no row. Give n of 1 or more.")
    need = []
    for layer in state.layers:
        owned = 0 if layer.pages is None else int(paging.used(layer.pages)[row].sum())
        need.append(pool.size_class(max(1, owned * n)))
    return _pick_rows(state, jnp.full(n, row), tuple(need))


@functools.partial(jax.jit, static_argnums=2)
def _pick_rows(state: KVState, index: Array, sizes: tuple[int, ...]) -> KVState:
    layers = tuple(
        LayerCache(
            ring=rings.rows(layer.ring, index),
            pages=None if layer.pages is None else pool.pick_rows(layer.pages, index, size),
            summary=jax.tree.map(lambda x: x[index], layer.summary),
        )
        for layer, size in zip(state.layers, sizes)
    )
    return dataclasses.replace(state, layers=layers, length=state.length[index], total=state.total[index])
