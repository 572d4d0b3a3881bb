"""How a lane lays out what a policy keeps: the same policy, other sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kvjax import decode
from kvjax.algebra import AdmitAll, Policy
from kvjax.cache import state as states
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.mesh import ONE, mesh_of
from kvjax.sharding.specs import WHOLE, of_state
from kvjax.types import EMPTY, Weighted

if TYPE_CHECKING:
    from jaxtyping import Int

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
    dtype, mesh = model.params["embed"].dtype, mesh_of(model.params)
    sizes: dict[str, Any] = {"rows": 1, "context": context, "page": page, "chunk_size": chunk}
    return decode.empty(model.network, policy, **sizes, dtype=dtype, mesh=mesh)


def shape(state: KVState) -> tuple[tuple[int, int], ...]:
    """Slots of a page and entries of a list, of each pool of a layer that has pools."""
    pools = next((layer.pools for layer in state.layers if layer.pools), ())
    return tuple((pages.size, pages.table.shape[-1]) for pages in pools)


@jax.jit
def copied(tree: Any) -> Any:
    """The same in buffers of its own, to be donated; one program."""
    return jax.tree.map(jnp.copy, tree)


def resized(state: KVState, counts: Sequence[int]) -> KVState:
    """The state with pools of so many pages a device, one number for each pool of a layer; layer by layer."""
    layers, mesh = list(state.layers), state.mesh
    state = dataclasses.replace(state, layers=())
    for index, layer in enumerate(layers):
        pools = [states.resize(pages, n, mesh) for pages, n in zip(layer.pools, counts)]
        layers[index] = layer.with_pools(pools)
        del layer, pools
    return dataclasses.replace(state, layers=tuple(layers))


def counts(state: KVState) -> list[int]:
    """Pages that a device has of each pool of a layer."""
    pools = next((layer.pools for layer in state.layers if layer.pools), ())
    return [pages.count // state.mesh.pools for pages in pools]


def page_bytes(state: KVState) -> list[float]:
    """Bytes that a page more on each device takes, of each pool of a layer."""
    pools = next((layer.pools for layer in state.layers if layer.pools), ())
    return [_page_bytes(pages) * state.mesh.pools for pages in pools]


def _page_bytes(pages: Pages) -> float:
    tables = (pages.table, pages.length, pages.n_free, pages.overflow)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    return (whole - sum(leaf.nbytes for leaf in tables)) / pages.count


def pages_for(slots: Int[np.ndarray, "*B K R"], size: int, devices: int) -> Int[np.ndarray, "*B D"]:
    """Pages that lists of so many slots own on each device; KV heads lie side by side."""
    return by_device(-(-slots // size), devices)


def by_device(x: Int[np.ndarray, "*B K R"], devices: int) -> Int[np.ndarray, "*B D"]:
    """Sums over the lists of each device."""
    return x.reshape(*x.shape[:-2], devices, -1).sum(axis=-1)


def most_pages(
    policy: Policy,
    state: KVState,
    lists: Sequence[np.ndarray],
    coming: int,
    arriving: int,
    lent: Sequence[np.ndarray] | None = None,
) -> list[int]:
    """Pages that suffice for a row on each device, one number for each pool of a layer: its fullest layer's.

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
    found, devices = [], state.mesh.pools
    for kind, ((size, entries), bound) in enumerate(zip(sizes, bounds)):
        most = entries * size if bound is None else min(bound, entries * size)
        need = 0
        for at in range(kind, len(lists), len(sizes)):
            live = lists[at]
            stream = live.sum(axis=-1)
            after = np.maximum(np.minimum(stream + coming, most), stream)
            more = pages_for(after, size, devices) + (live.shape[-1] - 1) * (len(live) // devices)
            need = max(need, int((more if lent is None else more - by_device(lent[at], devices)).max()))
        found.append(need)
    return found


def nothing(state: KVState) -> list[np.ndarray]:
    """The lists of a row that holds nothing, as ``most_pages`` takes them."""
    return [np.zeros(pages.length.shape[1:], np.int32) for layer in state.layers for pages in layer.pools]


def with_counts(state: KVState, counts: Sequence[int]) -> KVState:
    """Shapes of a state with pools of so many pages a device, and where they lie."""
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    layers = []
    for cache in state.layers:
        pools = [
            jax.eval_shape(functools.partial(states.resize, count=count, mesh=state.mesh), pages)
            for pages, count in zip(cache.pools, counts)
        ]
        layers.append(cache.with_pools(pools))
    return placed(dataclasses.replace(state, layers=tuple(layers)))


def placed(state: KVState) -> KVState:
    """Shapes of a state that know where they lie; on one device as they are."""
    mesh = state.mesh
    if mesh == ONE:
        return state

    def one(x: Any, spec: P = WHOLE) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh.sharding(spec))

    layers = jax.tree.map(one, state.layers, of_state(state.layers))
    return dataclasses.replace(jax.tree.map(one, dataclasses.replace(state, layers=())), layers=layers)


def widened(row: KVState, rows: int) -> KVState:
    """An empty state of so many rows, from one of a single row."""

    mesh = row.mesh

    def wide(x: Any, value: int = 0) -> Any:
        return np.full((rows, *x.shape[1:]), value, x.dtype)

    def layer(cache: LayerCache) -> LayerCache:
        pools = [
            dataclasses.replace(
                copied(pages),
                table=wide(pages.table, EMPTY),
                length=wide(pages.length),
            )
            for pages in cache.pools
        ]
        ring, summary = jax.tree.map(wide, (cache.ring, cache.summary))
        bare = dataclasses.replace(cache, ring=ring, summary=summary).with_pools(pools)
        return mesh.put(bare, of_state(bare))  # type: ignore[no-any-return]

    numbers: dict[str, Any] = {"length": wide(row.length), "total": wide(row.total)}
    numbers |= {"peak": np.zeros(2, np.float32)}
    numbers |= {"confidence": None if row.confidence is None else wide(row.confidence)}
    layers = tuple(layer(cache) for cache in row.layers)
    return dataclasses.replace(row, layers=layers, **mesh.put(numbers))
