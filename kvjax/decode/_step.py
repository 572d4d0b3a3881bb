"""New tokens on their way through the model, a layer's cache at every seam: one a row or many; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

OnRead = Callable[[int, LayerCache, layer.Read], None]
"""Told what a layer read: (layer, the cache after the token was written, the read)."""

Visit = Callable[..., "tuple[Array, Any]"]
"""Stands at a layer's seam: (info, heads, cache, *rows) to the attention output and the cache after."""


def step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
    on_read: OnRead | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed one token to every active row; logits of the next. Pure; jit and donate ``state``.

    Args:
      network: static.
      policy: a pytree; its structure is static, its dials are not.
      params: the model's weights.
      weights: the policy's learned weights, ``weights[place][layer]``.
      state: with pages reserved for the step (``reserve``).
      tokens: one id a row.
      active: rows that take part; the others leave no trace.
      on_read: told every layer's read while the step is traced, for those who count; what is not used of it
        costs nothing.
    """

    def visit(info: layer.LayerInfo, heads: Heads, cache: LayerCache, *rows: Array) -> tuple[Array, Any]:
        read, cache = layer.step(info, cache, heads, *rows)
        return read.out, (cache, read)

    def told(index: int, carry: tuple[LayerCache, layer.Read]) -> LayerCache:
        if on_read is not None:
            on_read(index, *carry)
        return carry[0]

    rows = (state.length, active)
    x, met = run_layers(network, policy, params, weights, state, tokens[:, None], visit, rows, layer.READ)
    caches = tuple(told(index, carry) for index, carry in enumerate(met))
    logits = network.logits(params, x[:, 0])
    length = state.mesh.everywhere(state.length + active.astype(jnp.int32))
    return with_confidence(
        policy, dataclasses.replace(state, layers=caches, length=length), logits, active
    ), logits


def chunk(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[KVState, Float[Array, "B D"]]:
    """Feed ``count`` of T tokens to every row; the last real token's output. Pure."""

    def visit(
        info: layer.LayerInfo, heads: Heads, cache: LayerCache, *rows: Array
    ) -> tuple[Array, LayerCache]:
        return layer.chunk(info, cache, heads, *rows)

    given = dataclasses.replace(state, confidence=None)  # no logits produced these tokens
    x, caches = run_layers(network, policy, params, weights, given, tokens, visit, (state.length, count))
    after = dataclasses.replace(state, layers=caches, length=state.mesh.everywhere(state.length + count))
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return after, jnp.take_along_axis(x, last, axis=1)[:, 0]


def run_layers(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    visit: Visit,
    rows: tuple[Array, ...] = (),
    beside: Any = None,
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Take T new tokens a row through the model, ``visit`` standing at every layer's seam. Pure.

    ``step`` and ``chunk`` are this with ``layer.step`` and ``layer.chunk`` as the visitor; give your own to
    look at what happens at a layer while it happens.

    Args:
      network, policy, params, weights, state: as in ``step``.
      tokens: T ids a row, at positions ``state.length`` and on.
      visit: (info, heads, cache, *rows) to the attention output and the cache after; on a mesh of each
        device's own.
      rows: further arrays [B, ...] that it needs.
      beside: None; or, where it gives (cache, something) for the cache, how that is cut on a mesh.

    Returns:
      The last layer's output, and of every layer the cache, or what was given for it.
    """
    positions = places(state.length, tokens)
    network = network.at(state.context)
    x = state.mesh.by_row(network.embed(params, tokens, positions))
    caches = []
    for index, (block, cache) in enumerate(zip(params["layers"], state.layers)):
        own, window = at_layer(policy, weights, index), network.windows[index]
        info = layer.LayerInfo(policy, own, index, network.num_layers, window, state.total, state.confidence)
        x, cache = through(network, info, index, block, x, positions, cache, visit, rows, state.mesh, beside)
        caches.append(cache)
    return x, tuple(caches)


def places(length: Int[Array, " B"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions of T new tokens a row."""
    return length[:, None] + jnp.arange(tokens.shape[1])[None, :]


def through(
    network: Network,
    info: layer.LayerInfo,
    index: int,
    block: Params,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    cache: LayerCache,
    visit: Visit,
    rows: tuple[Array, ...] = (),
    mesh: Mesh = ONE,
    beside: Any = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer, ``visit`` at its seam; ``index`` is this layer or one that differs in weights alone."""

    out = None if beside is None else (mesh.specs(cache), beside)

    def attend(_: int, heads: Heads, cache: LayerCache) -> tuple[Array, Any]:
        return layer.at_seam(mesh, visit, info, heads, cache, rows, out)

    x, cache = network.layer(block, index, x, positions, attend, cache)
    return mesh.by_row(x), cache


def at_layer(policy: Policy, weights: Params, index: int) -> Params:
    """What each part reads of its learned weights at a layer, by place."""
    return {p.place: p.at_layer(weights[p.place], index) for p in policy.parts if p.place in weights}


def with_confidence(
    policy: Policy, state: KVState, logits: Float[Array, "B V"], fed: Bool[Array, " B"]
) -> KVState:
    """The state with what the budget makes of the logits that rows were ``fed`` for. Pure."""
    found = confident(policy, state.confidence, logits, fed)
    return dataclasses.replace(state, confidence=state.mesh.everywhere(found))


def confident(
    policy: Policy, before: Float[Array, " B"] | None, logits: Float[Array, "B V"], fed: Bool[Array, " B"]
) -> Float[Array, " B"] | None:
    """``KVState.confidence`` after these logits; None where no budget asks."""
    return None if before is None else jnp.where(fed, policy.budget.confidence(logits), before)


step_program = jax.jit(step, static_argnames=("network", "on_read"), donate_argnames="state")
"""``step`` compiled with its state donated, for loops of one's own; ``segment`` is what ``stream`` runs."""
