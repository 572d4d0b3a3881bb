"""A layer's cache moved from one mesh to another, by way of the host.

Ids of pages count within a device, so pages are renamed: for one device those of all devices in turn, for a
mesh those of each device in the order of its KV heads. Pages move whole, because codes are relative to their
page's scale. One layer at a time is on the host, in every process all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import of_state
from kvjax.types import EMPTY

_PAGED = ("k", "v", "scales", "pos", "meta", "summary")
"""Fields of ``Pages`` that begin with [P]."""


def on_host(cache: Any, source: Mesh) -> Any:
    """A ``LayerCache`` in NumPy, in every process all of it; ids of its pages count through all devices.

    What lies in host memory is among its pages.
    """
    cache = source.read(cache)
    cache = cache.with_pools([_joined(pages, source, pages.count) for pages in cache.pools])
    if cache.hosted is None:
        return cache
    hosted = _joined(cache.hosted, source, len(cache.hosted.pos) // cache.pages.size)
    return dataclasses.replace(cache, hosted=hosted).whole


def moved(cache: Any, source: Mesh, target: Mesh, size_class: Callable[[int], int]) -> Any:
    """A ``LayerCache`` on another mesh, in pools of the smallest size class that holds its pages."""
    cache = on_host(cache, source)
    cache = cache.with_pools([_divided(pages, target, size_class) for pages in cache.pools])
    return target.put(cache, of_state(cache))


def _joined(pages: Any, source: Mesh, of_all: int) -> Any:
    """The pages, so many on all devices, with ids that count through these."""
    count = of_all // source.pools
    table = np.array(pages.table)
    for device, block in enumerate(source.blocks(table)):  # blocks are views of the table
        block[block != EMPTY] += device * count
    return dataclasses.replace(pages, table=table)


def _divided(pages: Any, target: Mesh, size_class: Callable[[int], int]) -> Any:
    """Pages of one device, divided among the devices of a mesh; on the host."""
    table, length = np.asarray(pages.table), np.asarray(pages.length)
    used = np.arange(table.shape[-1]) < (-(-length // pages.size))[..., None]
    owned = [ids[of_ids] for ids, of_ids in zip(target.blocks(table), target.blocks(used))]
    count = size_class(max(1, *map(len, owned)))
    renamed = np.full_like(table, EMPTY)
    for ids, of_ids in zip(target.blocks(renamed), target.blocks(used)):
        ids[of_ids] = np.arange(int(of_ids.sum()))

    def divide(x: np.ndarray) -> np.ndarray:
        divided = np.zeros((len(owned), count, *x.shape[1:]), x.dtype)
        for device, ids in enumerate(owned):
            divided[device, : len(ids)] = x[ids]
        return divided.reshape(-1, *x.shape[1:])

    paged: dict[str, Any] = jax.tree.map(divide, {name: getattr(pages, name) for name in _PAGED})
    free = np.asarray([count - len(ids) for ids in owned], np.int32)
    slot = np.arange(count)
    # The stack hands out low ids first: its top is the lowest free id.
    stack = np.where(slot < free[:, None], count - 1 - slot, 0)
    refs = slot < (count - free)[:, None]
    single = target == ONE
    of_pool: dict[str, Any] = {
        "table": renamed,
        "refs": refs.reshape(-1).astype(np.int32),
        "free": stack.reshape(-1).astype(np.int32),
        "n_free": free[0] if single else free,
        "overflow": np.False_ if single else np.zeros(len(owned), bool),
    }
    return dataclasses.replace(pages, **paged, **of_pool)
