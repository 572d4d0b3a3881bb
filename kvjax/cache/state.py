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
    wanted = []
    for used, layer in zip(found["used"], _paged(state)):
        need = _pages_for(layer, int(used), tokens, most)
        want = _pages_for(layer, int(used), max(tokens, ahead), most)
        grown = pool.size_class(max(want, min(2 * layer.count, 2 * want) if doubling else 0))
        wanted.append(layer.count if need <= layer.count else grown)
    return _resized(state, tuple(wanted))


def _pages_for(pages: Pages, used: int, tokens: int, most: int | None) -> int:
    """Pages a pool needs so that ``tokens`` more tokens a row fit in any distribution over its lists."""
    rows, heads, lists, _ = pages.table.shape
    need = used + rows * heads * lists * (-(-tokens // pages.size) + 1)
    if most is None:
        return need
    # Two lists split one stream's slots and may each end in a page of their own.
    return min(need, rows * heads * (-(-most // pages.size) + lists - 1))


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
