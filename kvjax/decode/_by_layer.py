"""New tokens through one program per layer, called by the host: layers of one kind share it.

XLA has no functions: a body that is called twice is compiled twice, and compile time grows with a model's
depth. Here it does not. Two layers are of one kind when they have the same window and the selection applies
to both or to neither; pools of other sizes are other programs, as everywhere.

Why: kvjax/DESIGN.md, 7.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode._step import at_layer, confidence_after, positions_after
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

DEEP = 8
"""On a CPU, a model of more layers is decoded by layer, too. There a layer's call costs 0.08 to 0.17 ms of
CPU time more than inside one program (a fifth of a step of 8 thin layers), and starting costs a third.
Elsewhere a step is one program."""


def runs_by_layer(network: Network, params: Params) -> bool:
    """Whether tokens are decoded by one program per layer; depends on where the weights lie."""
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    return network.num_layers > DEEP and device.platform == "cpu"


class LayerCall(NamedTuple):
    """What a layer's program is called with besides tokens and cache.

    Attributes:
      kind: the first layer like it; static.
      block: its weights of the model.
      own: its weights of the policy's parts, by place.
      number: which layer it is.
    """

    kind: int
    block: Params
    own: Params
    number: Int[Array, ""]


def layer_calls(
    network: Network, policy: Policy, params: Params, weights: Params, by_layer: Any = None
) -> list[LayerCall]:
    """All layers of a model; ``by_layer`` is ``weights_by_layer``, as the caller compiled it."""
    kinds = [(window, policy.selection.applies(i)) for i, window in enumerate(network.windows)]
    own_weights = (
        (by_layer or weights_by_layer)(policy, weights, len(kinds)) if weights else [{}] * len(kinds)
    )
    return [
        LayerCall(kinds.index(kind), block, own, jax.device_put(np.int32(i)))
        for i, (kind, block, own) in enumerate(zip(kinds, params["layers"], own_weights))
    ]


@functools.partial(jax.jit, static_argnums=2)
def weights_by_layer(policy: Policy, weights: Params, layers: int) -> list[Params]:
    """What each layer reads of a policy's learned weights, by place."""
    return [at_layer(policy, weights, index) for index in range(layers)]


def outer(params: Params) -> Params:
    """The model's weights outside its layers."""
    return {name: x for name, x in params.items() if name != "layers"}


class ChunkPrograms(NamedTuple):
    """What ``read_chunk`` runs: ``embed``, ``chunk_layer`` and ``after_chunk``."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    after: Callable[..., Any]


def read_chunk(
    network: Network,
    policy: Policy,
    params: Params,
    calls: Sequence[LayerCall],
    state: KVState,
    tokens: Int[np.ndarray, "B T"],
    count: Int[np.ndarray, " B"],
    last: Float[Array, "B D"],
    programs: ChunkPrograms | None = None,
) -> tuple[KVState, Float[Array, "B D"], Float[Array, "B T D"]]:
    """Feed ``count`` of T tokens to every row of a state, which is donated.

    ``programs`` are the functions that run, as the caller compiled them.

    Returns:
      The state, the output of each row's last token (``last`` of rows without one), and that of all tokens.
    """
    network, mesh = network.at(state.context), state.mesh
    counts, caches = mesh.put(count), []
    run = programs or ChunkPrograms(embed, chunk_layer, after_chunk)
    x = run.embed(network, outer(params), state.length, tokens, mesh)
    for call, cache in zip(calls, state.layers):  # no logits produced these tokens, so no confidence
        x, cache = run.layer(network, *call, policy, cache, x, state.length, counts, state.total, mesh=mesh)
        caches.append(cache)
    length, last = run.after(x, state.length, counts, last, mesh)
    return dataclasses.replace(state, layers=tuple(caches), length=length), last, x


@functools.partial(jax.jit, static_argnums=(0, 4))
def embed(
    network: Network,
    rest: Params,
    length: Int[Array, " B"],
    tokens: Int[Array, " B ..."],
    mesh: Mesh = ONE,
) -> Array:
    """Tokens at positions ``length`` and on, one per row or [B, T], as vectors [B, T, D]."""
    tokens = tokens.reshape(len(length), -1)
    return mesh.by_row(network.embed(rest, tokens, positions_after(length, tokens)))


def program(run: layer.LayerFn) -> Any:
    """``run`` at the attention of one layer, compiled; the cache is donated."""

    def call(
        network: Network,
        kind: int,
        block: Params,
        own: Params,
        index: Int[Array, ""],
        policy: Policy,
        cache: LayerCache,
        x: Float[Array, "B T D"],
        length: Int[Array, " B"],
        rows: Array,
        total: Int[Array, " B"],
        confidence: Float[Array, " B"] | None = None,
        *,
        mesh: Mesh = ONE,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        window, positions = network.windows[kind], positions_after(length, x[..., 0])
        info = layer.LayerInfo(policy, own, index, network.num_layers, window, total, confidence, kind)
        attend = layer.attention(run, lambda _: info, mesh, (length, rows))
        x, cache = network.layer(block, kind, x, positions, attend, cache)
        return mesh.by_row(x), cache

    return jax.jit(call, static_argnums=(0, 1), static_argnames="mesh", donate_argnames="cache")


def _step(
    info: layer.LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], done: Bool[Array, " B"]
) -> tuple[Array, LayerCache]:
    out, (cache, _) = layer.step(info, x, cache, length, ~done)
    return out, cache


chunk_layer, step_layer = program(layer.chunk), program(_step)
"""A layer's part in a chunk (``rows``: tokens of each) and in a step (``rows``: those that are done)."""


@functools.partial(jax.jit, static_argnums=4, donate_argnames=("length", "last"))
def after_chunk(
    x: Float[Array, "B T D"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    last: Float[Array, "B D"],
    mesh: Mesh = ONE,
) -> tuple[Int[Array, " B"], Float[Array, "B D"]]:
    """Lengths after a chunk, and the output of each row's last token."""
    newest = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return mesh.everywhere((length + count, jnp.where((count > 0)[:, None], newest, last)))


@functools.partial(jax.jit, static_argnums=(0, 6))
def last_logits(
    network: Network,
    policy: Policy,
    rest: Params,
    last: Float[Array, "B D"],
    confidence: Float[Array, " B"] | None,
    fed: Bool[Array, " B"],
    mesh: Mesh = ONE,
) -> tuple[Float[Array, "B V"], Float[Array, " B"] | None]:
    """Logits of each row's last output, and the confidence after the rows that were ``fed``."""
    logits = network.logits(rest, last)
    return mesh.everywhere((logits, confidence_after(policy, confidence, logits, fed)))
