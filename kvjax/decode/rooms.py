"""The rooms of a state: which exist under a policy, empty at first, and how they grow before tokens come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode.sizes import CHUNK, page_size
from kvjax.policy import Native, Policy
from kvjax.types import Network


def empty(
    network: Network,
    policy: Policy,
    *,
    rows: int,
    context: int,
    dtype: jnp.dtype,
    page: int | None = None,
    chunk_size: int = CHUNK,
) -> KVState:
    """A state that has seen nothing.

    Args:
      network: sizes of the model.
      policy: decides which rooms exist and what is kept with a slot.
      rows: B.
      context: most tokens a row will ever see.
      dtype: of keys and values, the model's own.
      page: slots of a page; by default ``page_size`` chooses.
      chunk_size: most tokens a row will be fed at a time.
    """
    dtype = jnp.dtype(dtype)
    heads, dim = network.num_kv_heads, network.head_dim

    def room(window: int | None) -> LayerCache:
        w = policy.window(context) if window is None else min(window, context)
        ring = rings.empty(rows, heads, w, dim, dtype, policy.keeps)
        if window is not None or not policy.paged(context):
            return LayerCache(ring=ring, pages=None, summary=None)
        summary = policy.completion.empty(rows, heads, dim, context)
        bounds = policy.bounds(context, chunk_size)
        held = []
        for storage, most in zip((Native(), policy.storage)[-len(bounds) :], bounds):
            longest = context if most is None else min(most, context)
            size = page_size(longest) if page is None else page
            held.append(
                pool.empty(
                    pages=1,
                    size=size,
                    rows=rows,
                    heads=heads,
                    lists=2 if policy.selection.splits else 1,
                    entries=max(1, -(-longest // size)),
                    head_dim=dim,
                    width=storage.width(dim),
                    dtype=storage.dtype(dtype),
                    scaled=storage.scaled,
                    meta=policy.keeps,
                    summary=policy.selection.summary_shapes(size, dim),
                )
            )
        return LayerCache(ring=ring, pages=None, summary=summary).with_rooms(held)

    return KVState(
        layers=tuple(room(window) for window in network.windows),
        length=jax.device_put(np.zeros(rows, np.int32)),
        total=jax.device_put(np.zeros(rows, np.int32)),
        peak=jax.device_put(np.zeros(2, np.float32)),
        context=context,
        chunk=chunk_size,
        confidence=jax.device_put(np.zeros(rows, np.float32)) if policy.budget.needs_logits else None,
    )


def reserve(policy: Policy, state: KVState, tokens: int, arriving: int, ahead: int = 0) -> KVState:
    """Make sure that ``tokens`` more tokens a row fit, ``arriving`` at a time, whatever is admitted.

    A pool that has to grow makes room for ``ahead`` tokens (decoding) or at least doubles (prefill).
    """
    most = policy.bounds(state.context, arriving)
    return states.reserve(state, tokens, most, ahead=ahead, doubling=arriving > 1)
