"""New tokens through one program a layer, called by the host: layers that are alike share it.

XLA has no functions: a body that is called twice is compiled twice, and compiling grows with a model's depth.
Here it does not. Layers are alike when the model's window and the selection treat them alike; pools of other
sizes are other programs, as everywhere.
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
from kvjax.decode._step import at_layer, confident, places, through
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Heads, Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

DEEP = 8
"""A model of more layers than this writes so, too, on a CPU: there each layer's call costs 0.08 to 0.17 ms of
CPU more than inside one program (a fifth of a step of 8 thin layers), and starting costs a third. Elsewhere a
step is one program. Where it pays was not searched."""


def writes_by_layer(network: Network, params: Params) -> bool:
    """Whether tokens are written by a program a layer; decided by where the weights lie."""
    here = next(iter(jax.tree.leaves(params)[0].devices()))
    return network.num_layers > DEEP and here.platform == "cpu"


class Site(NamedTuple):
    """A layer as its program is called.

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


def sites(network: Network, policy: Policy, params: Params, weights: Params) -> list[Site]:
    """All layers of a model."""
    kinds = [(window, policy.selection.applies(i)) for i, window in enumerate(network.windows)]
    owns = _owns(policy, weights, len(kinds)) if weights else [{}] * len(kinds)
    return [
        Site(kinds.index(kind), block, own, jax.device_put(np.int32(i)))
        for i, (kind, block, own) in enumerate(zip(kinds, params["layers"], owns))
    ]


@functools.partial(jax.jit, static_argnums=2)
def _owns(policy: Policy, weights: Params, layers: int) -> list[Params]:
    return [at_layer(policy, weights, index) for index in range(layers)]


def top(params: Params) -> Params:
    """The model's weights outside its layers."""
    return {name: x for name, x in params.items() if name != "layers"}


def read_chunk(
    network: Network,
    policy: Policy,
    params: Params,
    layers: Sequence[Site],
    state: KVState,
    tokens: Int[np.ndarray, "B T"],
    count: Int[np.ndarray, " B"],
    last: Float[Array, "B D"],
) -> tuple[KVState, Float[Array, "B D"]]:
    """As ``decode.chunk`` of a state that is donated; ``last`` of rows without a token stays."""
    state, last, _ = chunk_outputs(network, policy, params, layers, state, tokens, count, last)
    return state, last


def chunk_outputs(
    network: Network,
    policy: Policy,
    params: Params,
    layers: Sequence[Site],
    state: KVState,
    tokens: Int[np.ndarray, "B T"],
    count: Int[np.ndarray, " B"],
    last: Float[Array, "B D"],
) -> tuple[KVState, Float[Array, "B D"], Float[Array, "B T D"]]:
    """``read_chunk``, and the last layer's output of all tokens."""
    network, mesh = network.at(state.context), state.mesh
    of_rows, caches = mesh.put(count), []
    x = embed(network, top(params), state.length, tokens, mesh)
    for site, cache in zip(layers, state.layers):  # no logits produced these tokens, so no confidence
        x, cache = chunk_layer(
            network, *site, policy, cache, x, state.length, of_rows, state.total, mesh=mesh
        )
        caches.append(cache)
    length, last = fed(x, state.length, of_rows, last, mesh)
    return dataclasses.replace(state, layers=tuple(caches), length=length), last, x


@functools.partial(jax.jit, static_argnums=(0, 4))
def embed(
    network: Network,
    top: Params,
    length: Int[Array, " B"],
    tokens: Int[Array, " B ..."],
    mesh: Mesh = ONE,
) -> Array:
    """Tokens that follow ``length`` others, one a row or [B, T], as vectors [B, T, D]."""
    tokens = tokens.reshape(len(length), -1)
    return mesh.by_row(network.embed(top, tokens, places(length, tokens)))


Visited = Callable[[layer.LayerInfo, LayerCache, Heads, Any, Any], tuple["Array", LayerCache]]


def program(visit: Visited) -> Any:
    """``visit`` at the seam of a layer, compiled; the cache is donated."""

    def run(
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
        window, positions = network.windows[kind], places(length, x[..., 0])
        info = layer.LayerInfo(policy, own, index, network.num_layers, window, total, confidence, kind)

        def seen(
            info: layer.LayerInfo, heads: Heads, cache: LayerCache, *rows: Array
        ) -> tuple[Array, LayerCache]:
            return visit(info, cache, heads, *rows)

        return through(network, info, kind, block, x, positions, cache, seen, (length, rows), mesh)

    return jax.jit(run, static_argnums=(0, 1), static_argnames="mesh", donate_argnames="cache")


def _step(
    info: layer.LayerInfo, cache: LayerCache, x: Heads, length: Int[Array, " B"], done: Bool[Array, " B"]
) -> tuple[Array, LayerCache]:
    read, cache = layer.step(info, cache, x, length, ~done)
    return read.out, cache


chunk_layer, step_layer = program(layer.chunk), program(_step)
"""A layer's part in a chunk (``rows``: tokens of each) and in a step (``rows``: those that are done)."""


@functools.partial(jax.jit, static_argnums=4, donate_argnames=("length", "last"))
def fed(
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
def answer(
    network: Network,
    policy: Policy,
    top: Params,
    last: Float[Array, "B D"],
    confidence: Float[Array, " B"] | None,
    fed: Bool[Array, " B"],
    mesh: Mesh = ONE,
) -> tuple[Float[Array, "B V"], Float[Array, " B"] | None]:
    """Logits of each row's last output, and what the budget reads off those of the rows that were ``fed``."""
    logits = network.logits(top, last)
    return mesh.everywhere((logits, confident(policy, confidence, logits, fed)))
