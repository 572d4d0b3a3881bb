"""What a decode step loads, as its reads report it (``layer.Read.loaded``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax import decode, layer, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, LayerCache
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

KINDS = ("slots", "summary", "selector")
"""In tokens (K and V of one position): live slots; the completion's φ, by its bytes; and what the selection
looks at to choose (page summaries, or all keys)."""


def step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Array, Float[Array, "B R"]]:
    """``decode.step``, and what each row read by ``KINDS``, mean over layers and KV heads."""
    found: list[Array] = []

    def count(_: int, cache: LayerCache, read: layer.Read) -> None:
        found.append(_loads(cache, read.loaded))

    state, logits = decode.step(network, policy, params, weights, state, tokens, active, on_read=count)
    return state, logits, jnp.stack(found).mean(axis=0)


def _loads(cache: LayerCache, loaded: layer.Loaded) -> Float[Array, "B R"]:
    """What a layer's decode read loads, by ``KINDS``, mean over KV heads."""
    slots = loaded.ring.astype(jnp.float32) + loaded.pages.astype(jnp.float32).mean(axis=-1)
    phi = jnp.full_like(slots, metrics.summary_tokens(cache, by_bytes=True)) * loaded.summary
    return jnp.stack([slots, phi, loaded.selector.mean(axis=-1)], axis=-1)
