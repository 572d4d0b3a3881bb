"""Live bytes that a row's cache will hold under a policy, before anything is read: for ``auto(64MiB)``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Policy
from kvjax.types import Network

PAGE = 64
"""Slots of a page, which share its scales and its summary; longer lists have longer pages, and fewer."""


def live_bytes(policy: Policy, network: Network, dtype: Any, tokens: int, slots: float) -> float:
    """As ``kvjax.metrics.nbytes`` counts them: ring, pages, scales, metadata and summaries.

    Args:
      policy: what the cache keeps.
      network: whose cache it is; its layers with a sliding window of their own hold a ring of that width.
      dtype: of the model's weights.
      tokens: of prompt and answer.
      slots: that a KV head holds of them, ring included; mean over layers and heads.
    """
    sliding = [min(window, tokens) for window in network.windows if window is not None]
    layers = len(network.windows) - len(sliding)
    ring_slot = _slot(policy, network.head_dim, jnp.dtype(dtype)) + 1
    return network.num_kv_heads * (
        layers * _head(policy, network, dtype, tokens, slots) + sum(sliding) * ring_slot
    )


def _head(policy: Policy, network: Network, dtype: Any, tokens: int, slots: float) -> float:
    """Of one KV head."""
    h, own, storage = network.head_dim, jnp.dtype(dtype), policy.storage
    window = min(policy.window(tokens), tokens)
    total: float = window * (_slot(policy, h, own) + 1)
    if not policy.paged(tokens):
        return total
    paged = max(min(slots, tokens) - window, 0)
    exact = min(paged, policy.exact_slots(window))
    total += exact * (_slot(policy, h, own) + 4)
    numbers = sum(math.prod(shape) for shape in policy.selection.summary_shapes(PAGE, h).values())
    page = jnp.dtype(storage.read_dtype(own)).itemsize * numbers + storage.page_bytes(PAGE, h)
    encoded = _slot(policy, storage.width(h), storage.dtype(own)) + 4
    total += (paged - exact) * encoded + math.ceil((paged - exact) / PAGE) * page
    summary = jax.eval_shape(lambda: policy.completion.empty(1, 1, h, tokens))
    return total + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(summary))


def _slot(policy: Policy, width: int, dtype: Any) -> int:
    """Key, value and what the parts keep with them."""
    kept = [policy.arrays.get(name, ((), "float32")) for name in policy.keeps]
    return 2 * width * dtype.itemsize + sum(
        math.prod(shape) * jnp.dtype(kind).itemsize for shape, kind in kept
    )
