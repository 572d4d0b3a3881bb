"""New tokens on their way through the model; pure.

One decode step, from here to the kernels, in the order in which it runs (each line is a file):

  decode/_loop    decode_loop            the next step of every active row
  decode/_step    step, run_layers       embed the tokens, call every layer, read logits off the last output
  models/decoder  layer                  projections, RoPE, ``attend(index, heads, cache)``, MLP
  layer/_attend   attention              the layer's own part of the policy; on a mesh, every device its heads
  layer/_step     step                   window exit, write, evict, demote, read, merge
  layer/_read     read_pages             one partial of each page list and of φ
  pallas_kernels  blockwise, ragged_decode, merge
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.cache import mapped
from kvjax.cache.state import KVState, LayerCache
from kvjax.sharding.specs import of_state
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

OnRead = Callable[[int, LayerCache, layer.Read], None]
"""Called with (layer, the cache after the token was written, the read)."""


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
      policy: a pytree; its structure is static, its hyperparameters are traced.
      params: the model's weights.
      weights: the policy's learned weights, ``weights[place][layer]``.
      state: with pages reserved for the step (``reserve``).
      tokens: one id per row.
      active: rows that take part; the others leave no trace.
      on_read: called with each layer's ``Read`` during tracing, e.g. to count bytes; unused fields are
        compiled away.
    """
    params = read_in_turn(params, state.length)
    x, after = run_layers(
        network,
        policy,
        params,
        weights,
        state,
        tokens[:, None],
        layer.step,
        (state.length, active),
        lambda cache: (of_state(cache), layer.READ),
    )
    if on_read is not None:
        for index, (cache, read) in enumerate(after):
            on_read(index, cache, read)
    logits = network.logits(params, x[:, 0])
    state = dataclasses.replace(
        state,
        layers=tuple(cache for cache, _ in after),
        length=state.mesh.everywhere(state.length + active.astype(jnp.int32)),
        confidence=state.mesh.everywhere(confidence_after(policy, state.confidence, logits, active)),
    )
    return state, logits


def piece(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed ``count`` of T tokens to each row, a piece of a prompt; logits of each row's next token. Pure.

    ``extend`` reads the same, with one program per layer and pools that grow.

    Args:
      network, policy, params, weights: as in ``step``.
      state: with pages reserved for T tokens that come at once, T <= ``state.chunk``.
      tokens: T ids per row.
      count: how many of them are real; a row with 0 is left as it is, and its logits mean nothing.
    """
    mesh, before = state.mesh, dataclasses.replace(state, confidence=None)  # no logits produced these tokens
    x, layers = run_layers(
        network, policy, params, weights, before, tokens, layer.chunk, (state.length, count)
    )
    newest = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = network.logits(params, newest)
    state = dataclasses.replace(
        state,
        layers=layers,
        length=mesh.everywhere(state.length + count),
        confidence=mesh.everywhere(confidence_after(policy, state.confidence, logits, count > 0)),
    )
    return state, logits


def run_layers(
    network: Network,
    policy: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    tokens: Int[Array, "B T"],
    run: layer.LayerFn,
    rows: tuple[Array, ...] = (),
    out: Callable[[Any], Any] = of_state,
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Take T new tokens per row through the model; ``run`` is what happens at every layer's attention. Pure.

    ``step`` is this with ``layer.step``; give your own function to look at what happens at a layer while it
    happens.

    Args:
      network, policy, params, weights, state: as in ``step``.
      tokens: T ids per row, at positions ``state.length`` and on.
      run: (info, heads, cache, *rows) to (attention output, cache after it); on a mesh of each device's own.
      rows: further arrays [B, ...] that it needs.
      out: how what it returns for the cache is cut on a mesh.

    Returns:
      The last layer's output, and what ``run`` returned for the cache of every layer.
    """
    network, mesh = network.at(state.context), state.mesh
    info = layer_info(network, policy, weights, state)
    attend, after = layer.attention(run, info, mesh, rows, out), []
    positions = positions_after(state.length, tokens)
    x = mesh.by_row(network.embed(params, tokens, positions))
    for index, (block, cache) in enumerate(zip(params["layers"], state.layers)):
        x, carry = network.layer(block, index, x, positions, attend, cache)
        x = mesh.by_row(x)
        after.append(carry)
    return x, tuple(after)


def read_in_turn(params: Params, turn: Array) -> Params:
    """The weights, for one turn of a loop: on a CPU nothing is made of them before the loop. Pure.

    XLA would move what every turn does to a weight alone in front of the loop: it writes all matrices out
    once more, transposed, and a bfloat16 embedding in float32. That takes longer than a few turns.

    Args:
      params: the model's.
      turn: whatever changes from turn to turn.
    """

    def tied(params: Params, turn: Array) -> Params:
        return jax.lax.optimization_barrier((params, turn))[0]  # type: ignore[no-any-return]

    return jax.lax.platform_dependent(params, turn, cpu=tied, default=lambda params, turn: params)  # type: ignore[no-any-return]


def layer_info(
    network: Network, policy: Policy, weights: Params, state: KVState
) -> Callable[[int], layer.LayerInfo]:
    """What is known of each layer while a state's rows are written."""

    def info(index: int) -> layer.LayerInfo:
        own, window = at_layer(policy, weights, index), network.windows[index]
        return layer.LayerInfo(policy, own, index, network.num_layers, window, state.total, state.confidence)

    return info


def after_prompt(policy: Policy, weights: Params, state: KVState) -> tuple[Policy, Params, KVState]:
    """``policy.after_prompt``, its weights, and the state as one that was made under it."""
    rest = policy.after_prompt
    own = {part.place: weights[part.place] for part in rest.learned if part.place in weights}
    return rest, own, dataclasses.replace(state, structure=rest.structure)


def positions_after(length: Int[Array, " B"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions of T new tokens per row."""
    return length[:, None] + jnp.arange(tokens.shape[1])[None, :]


def at_layer(policy: Policy, weights: Params, index: int) -> Params:
    """What each part reads of its learned weights at a layer, by place."""
    return {p.place: p.at_layer(weights[p.place], index) for p in policy.learned if p.place in weights}


def confidence_after(
    policy: Policy, before: Float[Array, " B"] | None, logits: Float[Array, "B V"], fed: Bool[Array, " B"]
) -> Float[Array, " B"] | None:
    """``KVState.confidence`` after rows were ``fed`` and gave these logits; None where no budget asks."""
    return None if before is None else jnp.where(fed, policy.budget.confidence(logits), before)


step_program = mapped.jit(step, static=("network", "on_read"), donate="state")
"""``step`` compiled with its state donated, for loops of your own; ``stream`` runs ``decode_steps``."""
