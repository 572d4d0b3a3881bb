"""Does the running batch of a policy fit into KV memory? Computed from shapes, before anything is made."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.decode import RequestError
from kvjax.engine.settings import EngineSettings
from kvjax.sharding.mesh import mesh_of
from kvjax.types import Weighted


def check_fits(model: Weighted, settings: EngineSettings, policy: Policy) -> None:
    """Refuses a policy, in the layout of batches, whose batch never fits, whatever makes room.

    Raises:
      RequestError: with the bytes.
    """
    size = empty_bytes(model, settings, policy)
    if size > settings.kv_memory:
        raise RequestError(
            f"a running batch of '{policy!r}' with {settings.max_rows} rows needs {size} bytes before it "
            f"holds a token, and kv_memory is {settings.kv_memory}. Raise it, or lower max_rows."
        )


def empty_bytes(model: Weighted, settings: EngineSettings, policy: Policy) -> int:
    """Device bytes of ``max_rows`` rows that have seen nothing, with a page in each pool."""
    sizes: dict[str, Any] = {"context": settings.context, "page": settings.page, "chunk_size": settings.chunk}
    make = functools.partial(
        decode.empty_layers,
        model.network,
        policy,
        rows=1,
        **sizes,
        dtype=model.params["embed"].dtype,
        mesh=mesh_of(model.params),
    )
    size = 0
    for cache in jax.eval_shape(make):
        rows = [cache.ring, cache.summary, *((pages.table, pages.length) for pages in cache.pools)]
        of_row = _bytes(rows)
        size += settings.max_rows * of_row + _bytes(cache) - of_row
    return size


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
