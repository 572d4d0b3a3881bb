"""A state brought from one mesh to another, by way of the host.

Ids of pages count within a device, so pages are renamed: those of all devices one after the other for one
device, those of each device's streams in the order of its streams for a mesh. Pages move whole: codes are
relative to their page's scale. A layer at a time is on the host, in every process all of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.pages import Pages
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.mesh import CONTEXT, ONE, Mesh
from kvjax.types import EMPTY

_PAGED = ("k", "v", "scales", "pos", "meta", "summary")
"""Fields of ``Pages`` that begin with [P]."""


def reshard(state: KVState, mesh: Mesh) -> KVState:
    """The state on another mesh, or on one device (``ONE``), in pools that just hold it.

    Args:
      state: left as it is.
      mesh: must divide its rows and KV heads.
    """
    if state.mesh == mesh:
        return state
    numbers = {name: getattr(state, name) for name in ("length", "total", "peak", "confidence")}
    layers = tuple(_moved(cache, state.mesh, mesh) for cache in state.layers)
    return dataclasses.replace(state, layers=layers, mesh=mesh, **mesh.put(state.mesh.read(numbers)))


def fork(state: KVState, row: int, n: int) -> KVState:
    """n rows, each a copy of ``row``: several continuations of one compressed context.

    Pages are copied, so every page keeps exactly one owner; on a mesh by way of the host.

    Raises:
      IndexError: no such row.
      ValueError: n < 1, or a state that was donated.
      MeshError: a mesh that does not divide n rows.
    """
    heads = state.layers[0].ring.k.shape[1]
    state.mesh.check(f"fork(n={n})", rows=n, heads=heads * state.mesh.size(CONTEXT), kv_heads=heads)
    if state.gone or state.mesh == ONE:
        return states.fork(state, row, n)
    return reshard(states.fork(reshard(state, ONE), row, n), state.mesh)


def on_host(cache: LayerCache, source: Mesh) -> LayerCache:
    """A layer in NumPy, in every process all of it; ids of its pages count through all devices."""
    found: LayerCache = source.read(cache)
    return found.with_pools([_joined(pages, source) for pages in found.pools])


def _moved(cache: LayerCache, source: Mesh, mesh: Mesh) -> LayerCache:
    found = on_host(cache, source)
    found = found.with_pools([_dealt(pages, mesh) for pages in found.pools])
    return mesh.put(found, mesh.specs(found))  # type: ignore[no-any-return]


def _joined(pages: Pages, source: Mesh) -> Pages:
    """The pages with ids that count through all devices."""
    count = pages.count // source.pools
    table: Any = np.array(pages.table)
    for at, own in enumerate(source.blocks(table)):  # views
        own[own != EMPTY] += at * count
    return dataclasses.replace(pages, table=table)


def _dealt(pages: Pages, mesh: Mesh) -> Pages:
    """Pages of one device, dealt to those of a mesh; on the host."""
    table, length = np.asarray(pages.table), np.asarray(pages.length)
    inside = np.arange(table.shape[-1]) < (-(-length // pages.size))[..., None]
    owned = [ids[here] for ids, here in zip(mesh.blocks(table), mesh.blocks(inside))]
    count = pool.size_class(max(1, *map(len, owned)))
    renamed = np.full_like(table, EMPTY)
    for own, here in zip(mesh.blocks(renamed), mesh.blocks(inside)):
        own[here] = np.arange(int(here.sum()))

    def deal(x: np.ndarray) -> np.ndarray:
        dealt = np.zeros((len(owned), count, *x.shape[1:]), x.dtype)
        for at, ids in enumerate(owned):
            dealt[at, : len(ids)] = x[ids]
        return dealt.reshape(-1, *x.shape[1:])

    paged: dict[str, Any] = jax.tree.map(deal, {name: getattr(pages, name) for name in _PAGED})
    free = np.asarray([count - len(ids) for ids in owned], np.int32)
    at = np.arange(count)
    # The stack hands out low ids first: its top is the lowest free id.
    stack = np.where(at < free[:, None], count - 1 - at, 0)
    refs = at < (count - free)[:, None]
    lone = mesh == ONE
    of_pool: dict[str, Any] = {
        "table": renamed,
        "refs": refs.reshape(-1).astype(np.int32),
        "free": stack.reshape(-1).astype(np.int32),
        "n_free": free[0] if lone else free,
        "overflow": np.False_ if lone else np.zeros(len(owned), bool),
    }
    return dataclasses.replace(pages, **paged, **of_pool)
