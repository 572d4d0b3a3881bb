"""A state as a long prompt leaves it, made without reading a prompt.

Reading 32 thousand random tokens takes minutes, and their attention is of no use here. So keys, values
and queries are drawn, and the same functions as in prefill (``kvjax.layer``) admit, score, choose and store.
Queries of later heads are larger, so that heads differ and per-head budgets become ragged. Attention that a
policy ranks by is drawn, too, because the real one would cost minutes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax import layer as layers
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.models.decoder import Decoder
from kvjax.models.spec import ModelSpec
from kvjax.types import Heads, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Int


def untrained(model: Weighted, policy: Policy, seed: int) -> Params:
    """Learned weights without training, which cost as much as trained ones."""
    return {part.place: part.untrained(model, seed) for part in policy.learned}


def filled(
    network: Decoder,
    policy: Policy,
    weights: Params,
    tokens: int,
    context: int,
    dtype: jnp.dtype,
    seed: int,
    new: int,
) -> KVState:
    """One row that has seen ``tokens`` tokens, with the room that ``stream`` makes for ``new`` more."""
    state = decode.empty(network, policy, rows=1, context=context, dtype=dtype)
    keys = jax.random.split(jax.random.PRNGKey(seed), network.num_layers)
    caches = []
    for index, (cache, key) in enumerate(zip(state.layers, keys)):
        learned = {part.place: part.at_layer(weights[part.place], index) for part in policy.learned}
        at = jnp.asarray(index)
        new_tokens, kept = _admitted(network.spec, policy, tokens, dtype, cache.ring.window, learned, at, key)
        pages = decode.prompt_pages(policy, cache, np.asarray(kept))
        caches.append(_stored(policy, network.num_layers, pages, learned, cache, new_tokens, at))
    seen = jnp.full(1, tokens, jnp.int32)
    state = dataclasses.replace(state, layers=tuple(caches), length=seen, total=jnp.copy(seen))
    # As after a prefill (pools at their smallest class), then as ``stream`` grows them.
    state = states.fit(state)
    return decode.reserve(policy, state, new, 1, ahead=max(new, decode.HORIZON))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _admitted(
    spec: ModelSpec,
    policy: Policy,
    tokens: int,
    dtype: jnp.dtype,
    window: int,
    weights: Params,
    index: Int[Array, ""],
    key: Array,
) -> tuple[Entry, Int[Array, "1 K"]]:
    """A layer's tokens with their admission, and how many of each KV head GLOBAL will hold."""
    total = jnp.full(1, tokens, jnp.int32)
    pos = jnp.arange(tokens, dtype=jnp.int32)[None]
    heads = _drawn(spec, tokens, dtype, key)
    info = layers.LayerInfo(policy, weights, index, spec.num_layers, None, total)
    seen = layers.observe(info, heads, pos)
    new = layers.arriving(info, heads, pos, seen)
    if policy.budget.limited and policy.eviction.needs_mass:
        mass = jax.random.exponential(jax.random.fold_in(key, 1), (1, spec.num_heads, tokens)) / tokens
        seen = dataclasses.replace(seen, values=seen.values | {"mass": mass})
        if policy.tracks_mass:
            meta = layers.accumulate_mass(info, pos[:, None], new.meta, mass, total)
            new = dataclasses.replace(new, meta=meta)
    if policy.budget.limited:
        new = dataclasses.replace(new, admit=new.admit & layers.retained(info, new, seen))
    return new, layers.count_stored(new, total, window)


def _drawn(spec: ModelSpec, tokens: int, dtype: jnp.dtype, key: Array) -> Heads:
    n, k, h, d = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.model_dim
    of_q, of_k, of_v, of_x = jax.random.split(key, 4)

    def draw(of: Array, *shape: int) -> Array:
        return jax.random.normal(of, (1, tokens, *shape), jnp.float32).astype(dtype)

    q = draw(of_q, n, h) * jnp.linspace(0.5, 2.0, n).astype(dtype)[:, None]
    key_, value = draw(of_k, k, h), draw(of_v, k, h)
    return Heads(q=q, k=key_, v=value, q_pre=q, k_pre=key_, hidden=draw(of_x, d))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _stored(
    policy: Policy,
    count: int,
    pages: tuple[int, ...],
    weights: Params,
    cache: LayerCache,
    tokens: Entry,
    index: Int[Array, ""],
) -> LayerCache:
    total = jnp.full(1, tokens.pos.shape[1], jnp.int32)
    cache = cache.with_pools([pool.resize(held, count) for held, count in zip(cache.pools, pages)])
    return layers.store(layers.LayerInfo(policy, weights, index, count, None, total), cache, tokens, total)
