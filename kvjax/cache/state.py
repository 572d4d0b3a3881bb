"""The whole state: three rooms a layer, and how many tokens each row has seen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
      history: the older part of GLOBAL, where its precision changes with age (``kvjax.ageing``); else None.
    """

    ring: Ring
    pages: Pages | None
    summary: Any
    history: Pages | None = None

    @property
    def rooms(self) -> tuple[Pages, ...]:
        """GLOBAL: none, one or two rooms, in the order of their line (``kvjax.cache.line``)."""
        return tuple(pages for pages in (self.pages, self.history) if pages is not None)

    def with_rooms(self, rooms: Sequence[Pages]) -> LayerCache:
        """The same layer with its rooms replaced, in their order; those not given stay."""
        all_rooms = [*rooms, *self.rooms[len(rooms) :], None, None]
        return dataclasses.replace(self, pages=all_rooms[0], history=all_rooms[1])


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
      confidence: what the budget read off each row's last logits; it decides their next step. None where no
        budget asks.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]
    total: Int[Array, " B"]
    peak: Float[Array, " 2"]
    context: int
    chunk: int
    confidence: Float[Array, " B"] | None = None

    @property
    def rows(self) -> int:
        """B."""
        return self.length.shape[0]


class PoolOverflowError(RuntimeError):
    """A pool or a page list was too small: a fault of the reservation, never of the user."""


@jax.jit
def _page_counts(state: KVState) -> dict[str, Array]:
    paged = _rooms(state)
    if not paged:
        return {}
    return {
        "used": jnp.stack([p.count - p.n_free for p in paged]),
        "overflow": jnp.stack([p.overflow for p in paged]),
        "slots": jnp.stack([p.length.sum() for p in paged]),
    }


def counts(state: KVState) -> dict[str, np.ndarray]:
    """Owned pages, live slots and overflow flags of all rooms, layer by layer; read in one go.

    Raises:
      PoolOverflowError: a token was lost.
    """
    found: dict[str, np.ndarray] = jax.device_get(_page_counts(state))
    if found and found["overflow"].any():
        where = [index for index, layer in enumerate(state.layers) for _ in layer.rooms]
        short = sorted({where[room] for room in np.flatnonzero(found["overflow"])})
        raise PoolOverflowError(f"layers {short} ran out of pages. Reserve more before the segment.")
    return found


def reserve(
    state: KVState, tokens: int, most: Sequence[int | None], *, ahead: int = 0, doubling: bool = False
) -> KVState:
    """Grow pools until ``tokens`` more tokens a row fit whatever is admitted (host side, reads page counts).

    Args:
      state: the state; pools that need not grow keep their buffers.
      tokens: tokens a row about to come.
      most: the most slots a stream can ever own of each of a layer's rooms, or None.
      ahead: a pool that must grow makes room for this many tokens, so that not every segment of a long
        answer meets a new size and a compilation.
      doubling: a pool that must grow at least doubles, for the same reason; for prefill, after which
        ``fit`` gives the excess back.
    """
    found = counts(state)
    if not found:
        return state
    rooms, held = _rooms(state), [int(n) for n in found["slots"]]
    kinds = len(rooms) // sum(layer.pages is not None for layer in state.layers)  # rooms of a layer
    sizes = [room.count for room in rooms]
    for kind in range(kinds):
        alike = slice(kind, None, kinds)
        sizes[alike] = _sizes(rooms[alike], held[alike], tokens, most[kind], ahead, doubling)
    same = all(room.count == size for room, size in zip(rooms, sizes))
    return state if same else _resized(state, tuple(sizes))


def _sizes(
    rooms: list[Pages], held: list[int], tokens: int, most: int | None, ahead: int, doubling: bool
) -> list[int]:
    """Pages of the pools of one kind, one a layer."""
    needs = [_pages_for(room, n, tokens, most) for room, n in zip(rooms, held)]
    if all(need <= room.count for need, room in zip(needs, rooms)):
        return [room.count for room in rooms]
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
    return [max(size, room.count) for size, room in zip(grown, rooms)]


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


def _rooms(state: KVState) -> list[Pages]:
    """All rooms of GLOBAL, layer by layer."""
    return [room for layer in state.layers for room in layer.rooms]


_resize = jax.jit(pool.resize, static_argnums=1)


def _resized(state: KVState, sizes: tuple[int, ...]) -> KVState:
    """The state with all pools at these sizes; untouched pools keep their buffers."""
    size = iter(sizes)

    def sized(room: Pages) -> Pages:
        want = next(size)
        return room if want == room.count else _resize(room, want)

    layers = tuple(layer.with_rooms([sized(room) for room in layer.rooms]) for layer in state.layers)
    return dataclasses.replace(state, layers=layers)


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
    owned = [int(paging.used(room)[row].sum()) for room in _rooms(state)]
    return _pick_rows(state, jnp.full(n, row), tuple(pool.size_class(max(1, pages * n)) for pages in owned))


@functools.partial(jax.jit, static_argnums=2)
def _pick_rows(state: KVState, index: Array, sizes: tuple[int, ...]) -> KVState:
    size = iter(sizes)
    layers = tuple(
        dataclasses.replace(
            layer,
            ring=rings.rows(layer.ring, index),
            summary=jax.tree.map(lambda x: x[index], layer.summary),
        ).with_rooms([pool.pick_rows(room, index, next(size)) for room in layer.rooms])
        for layer in state.layers
    )
    return dataclasses.replace(
        state,
        layers=layers,
        length=state.length[index],
        total=state.total[index],
        confidence=None if state.confidence is None else state.confidence[index],
    )
