"""How a lane lays out what a policy keeps: the same policy, other sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import AdmitAll, Policy
from kvjax.cache import pool
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.types import EMPTY, Weighted

WINDOW = 64
"""Ring slots of a cache that keeps everything."""


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitAllPaged(AdmitAll):
    """Every token outlives a window that means nothing: where the ring ends and the pages begin."""

    window: int = WINDOW  # type: ignore[assignment]


def paged(policy: Policy, context: int) -> Policy:
    """The policy, in pages where alone it would be one ring as long as the context.

    Rows of a batch differ in length; a ring for each as long as the longest may be would hold mostly nothing.
    """
    idle = all(part.idle for part in policy.parts)
    window = max(WINDOW, policy.protects)
    if not idle or window >= context:
        return policy
    return dataclasses.replace(policy, admission=AdmitAllPaged(window))


def empty_row(model: Weighted, policy: Policy, *, context: int, chunk: int, page: int | None) -> KVState:
    """One row that has seen nothing; its pools have a page each."""
    dtype = model.params["embed"].dtype
    return decode.empty(
        model.network, policy, rows=1, context=context, dtype=dtype, page=page, chunk_size=chunk
    )


def shape(state: KVState) -> tuple[tuple[int, int], ...]:
    """Slots of a page and entries of a list, of each pool of a layer that has pools."""
    pools = next((layer.pools for layer in state.layers if layer.pools), ())
    return tuple((pages.size, pages.table.shape[-1]) for pages in pools)


_resize = jax.jit(pool.resize, static_argnums=1)


@jax.jit
def copied(tree: Any) -> Any:
    """The same in buffers of its own, to be donated; one program."""
    return jax.tree.map(jnp.copy, tree)


def resized(state: KVState, counts: Sequence[int]) -> KVState:
    """The state with pools of so many pages, one number for each pool of a layer; layer by layer."""
    layers = list(state.layers)
    state = dataclasses.replace(state, layers=())
    for index, layer in enumerate(layers):
        layers[index] = layer.with_pools([_resize(pages, n) for pages, n in zip(layer.pools, counts)])
        del layer
    return dataclasses.replace(state, layers=tuple(layers))


def page_bytes(layer: LayerCache) -> list[float]:
    """Device bytes that one page of each pool takes."""
    return [_page_bytes(pages) for pages in layer.pools]


def _page_bytes(pages: Pages) -> float:
    tables = (pages.table, pages.length, pages.n_free, pages.overflow)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    return (whole - sum(leaf.nbytes for leaf in tables)) / pages.count


def pages_for(slots: np.ndarray, size: int) -> int:
    """Pages that lists of so many slots own."""
    return int((-(-slots // size)).sum())


def most_pages(
    policy: Policy,
    state: KVState,
    lists: Sequence[np.ndarray],
    coming: int,
    arriving: int,
    lent: Sequence[np.ndarray] | None = None,
) -> list[int]:
    """Pages that suffice for a row, one number for each pool of a layer: its fullest layer's.

    Args:
      policy: what the row keeps.
      state: any state of the lane; its sizes alone are looked at.
      lists: live slots [K, R] of the row, of each pool of each layer in turn.
      coming: tokens that may still come, all of them to be stored.
      arriving: how many at a time.
      lent: pages [K, R] of these lists that another row lends, which are not counted.
    """
    sizes = shape(state)
    if not sizes:
        return []
    bounds = decode.slot_bounds(policy, state.context, arriving, [size for size, _ in sizes])
    found = []
    for kind, ((size, entries), bound) in enumerate(zip(sizes, bounds)):
        most = entries * size if bound is None else min(bound, entries * size)
        need = 0
        for at in range(kind, len(lists), len(sizes)):
            live = lists[at]
            stream = live.sum(axis=-1)
            after = np.maximum(np.minimum(stream + coming, most), stream)
            more = pages_for(after, size) + (live.shape[-1] - 1) * len(live)
            need = max(need, more - (0 if lent is None else int(lent[at].sum())))
        found.append(need)
    return found


def nothing(state: KVState) -> list[np.ndarray]:
    """The lists of a row that holds nothing, as ``most_pages`` takes them."""
    return [np.zeros(pages.length.shape[1:], np.int32) for layer in state.layers for pages in layer.pools]


def with_counts(state: KVState, counts: Sequence[int]) -> KVState:
    """Shapes of a state with pools of so many pages."""
    layers = []
    for cache in state.layers:
        pools = [
            jax.eval_shape(functools.partial(pool.resize, count=count), pages)
            for pages, count in zip(cache.pools, counts)
        ]
        layers.append(cache.with_pools(pools))
    return dataclasses.replace(state, layers=tuple(layers))


def widened(row: KVState, rows: int) -> KVState:
    """An empty state of so many rows, from one of a single row."""

    def wide(x: Any) -> Any:
        return jax.device_put(np.zeros((rows, *x.shape[1:]), x.dtype))

    def empty(x: Any, value: int = 0) -> Any:
        return jax.device_put(np.full((rows, *x.shape[1:]), value, x.dtype))

    def layer(cache: LayerCache) -> LayerCache:
        pools = [
            dataclasses.replace(
                copied(pages),
                table=empty(pages.table, EMPTY),
                length=empty(pages.length),
            )
            for pages in cache.pools
        ]
        ring, summary = jax.tree.map(wide, (cache.ring, cache.summary))
        return dataclasses.replace(cache, ring=ring, summary=summary).with_pools(pools)

    return dataclasses.replace(
        row,
        layers=tuple(layer(cache) for cache in row.layers),
        length=empty(row.length),
        total=empty(row.total),
        peak=jax.device_put(np.zeros(2, np.float32)),
        confidence=None if row.confidence is None else wide(row.confidence),
    )
