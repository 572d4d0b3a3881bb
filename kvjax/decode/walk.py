"""New tokens on their way through the model, a layer's room at every seam: one a row or many; pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax import layer as layers
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode.weights import at_layer
from kvjax.policy import Policy
from kvjax.types import Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def step(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed one token to every active row; logits of the next. Pure; jit and donate ``state``.

    Args:
      network, policy: static.
      params: the model's weights.
      weights: the policy's learned weights, ``weights[place][layer]``.
      state: with pages reserved for the step (``reserve``).
      tokens: one id a row.
      active: rows that take part; the others leave no trace.
    """

    def visit(site: layers.Site, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
        return layers.step(site, room, heads, state.length, active)

    x, rooms = through(network, policy, params, weights, state, tokens[:, None], visit)
    logits = network.logits(params, x[:, 0])
    length = state.length + active.astype(jnp.int32)
    return with_confidence(
        policy, dataclasses.replace(state, layers=rooms, length=length), logits, active
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

    def visit(site: layers.Site, heads: Heads, room: LayerCache) -> tuple[Array, LayerCache]:
        return layers.chunk(site, room, heads, state.length, count)

    given = dataclasses.replace(state, confidence=None)  # no logits produced these tokens
    x, rooms = through(network, policy, params, weights, given, tokens, visit)
    after = dataclasses.replace(state, layers=rooms, length=state.length + count)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return after, jnp.take_along_axis(x, last, axis=1)[:, 0]


def through(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    visit: Callable[[layers.Site, Heads, LayerCache], tuple[Array, LayerCache]],
) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
    """Walk T new tokens a row through the model, ``visit`` standing at every layer's seam. Pure.

    ``step`` and ``chunk`` are this with ``layer.step`` and ``layer.chunk`` as the visitor; give your own to
    look at what happens at a layer while it happens.

    Args:
      network, policy, params, weights, state: as in ``step``.
      tokens: T ids a row, at positions ``state.length`` and on.
      visit: (site, heads, room) to the mixed values and the room after.

    Returns:
      The last layer's output, and every layer's room.
    """
    positions = state.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
    network = network.at(state.context)
    x = network.embed(params, tokens, positions)
    rooms = []
    for index, (block, room) in enumerate(zip(params["layers"], state.layers)):
        site = _site(network, policy, weights, index, state)

        def attend(
            _: int, heads: Heads, room: LayerCache, site: layers.Site = site
        ) -> tuple[Array, LayerCache]:
            return visit(site, heads, room)

        x, room = network.layer(block, index, x, positions, attend, room)
        rooms.append(room)
    return x, tuple(rooms)


def _site(network: Network, policy: Policy, weights: Params, index: int, state: KVState) -> layers.Site:
    mine, window = at_layer(policy, weights, index), network.windows[index]
    return layers.Site(policy, mine, index, network.num_layers, window, state.total, state.confidence)


def with_confidence(
    policy: Policy, state: KVState, logits: Float[Array, "B V"], fed: Bool[Array, " B"]
) -> KVState:
    """The state with what the budget makes of the logits that rows were ``fed`` for. Pure."""
    if state.confidence is None:
        return state
    return dataclasses.replace(
        state, confidence=jnp.where(fed, policy.budget.confidence(logits), state.confidence)
    )


@functools.partial(jax.jit, static_argnames="network")
def logits_of(network: Network, params: Params, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """The network's logits, as a program of its own."""
    return network.logits(params, x)


_STATIC = ("network", "policy")
chunk_program = jax.jit(chunk, static_argnames=_STATIC, donate_argnames="state")
step_program = jax.jit(step, static_argnames=_STATIC, donate_argnames="state")
"""``step`` compiled with its state donated, for loops of one's own; ``segment`` is what ``stream`` runs."""
