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
from kvjax.cache import mapped
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode._step import at_layer, confidence_after, positions_after
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import Heads, Network, Params, Weighted, of_layer

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


def no_output(model: Weighted, state: KVState) -> Float[Array, "B D"]:
    """The output of rows that were fed no token."""
    embed = model.params["embed"]
    return state.mesh.put(np.zeros((state.rows, embed.shape[1]), embed.dtype))


class ChunkPrograms(NamedTuple):
    """What ``read_chunk`` runs: ``embed``, ``chunk_layer`` and ``after_chunk``.

    ``read_rows`` takes ``chunk_layer_of_rows`` and ``after_rows`` instead of the last two.
    """

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
    # No logits produced these tokens, so no confidence.
    for index, (call, cache) in enumerate(zip(calls, state.layers)):
        one = of_layer(network, index)
        x, cache = run.layer(one, *call, policy, cache, x, state.length, counts, state.total, mesh=mesh)
        caches.append(cache)
    length, last = run.after(x, state.length, counts, last, mesh)
    return dataclasses.replace(state, layers=tuple(caches), length=length), last, x


def read_rows(
    network: Network,
    policies: Sequence[Policy],
    params: Params,
    calls: Sequence[Sequence[LayerCall]],
    rows: Sequence[KVState],
    tokens: Int[np.ndarray, "B T"],
    length: Int[np.ndarray, " B"],
    count: Int[np.ndarray, " B"],
    programs: ChunkPrograms,
) -> list[tuple[KVState, Float[Array, "1 D"]]]:
    """``read_chunk`` of several states of one row, in one program a layer. The states are donated.

    Args:
      network, params: the model, on one device.
      policies: of the rows; of one structure.
      calls: of the layers, for each row.
      rows: their states, whose arrays have the same shapes.
      tokens, length, count: what each row is fed, how many tokens it has seen and how many come; on the host.
      programs: the functions that run, as the caller compiled them.

    Returns:
      Each row's state, and the output of its last token.
    """
    network, totals = network.at(rows[0].context), tuple(state.total for state in rows)
    x, layers = programs.embed(network, outer(params), length, tokens, ONE), []
    for index, (of_rows, caches) in enumerate(zip(zip(*calls), zip(*(state.layers for state in rows)))):
        one, (kind, block, _, number) = of_layer(network, index), of_rows[0]
        own = tuple(call.own for call in of_rows)
        x, caches = programs.layer(
            one, kind, block, own, number, tuple(policies), caches, x, length, count, totals
        )
        layers.append(caches)
    after = programs.after(x, length, count)
    return [
        (dataclasses.replace(state, layers=of_row, length=seen), last)
        for state, of_row, (seen, last) in zip(rows, zip(*layers), after)
    ]


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

    return mapped.jit(call, static=("network", "kind", "mesh"), donate="cache")


def _step(
    info: layer.LayerInfo, x: Heads, cache: LayerCache, length: Int[Array, " B"], done: Bool[Array, " B"]
) -> tuple[Array, LayerCache]:
    out, (cache, _) = layer.step(info, x, cache, length, ~done)
    return out, cache


chunk_layer, step_layer = program(layer.chunk), program(_step)
"""A layer's part in a chunk (``rows``: tokens of each) and in a step (``rows``: those that are done)."""


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="caches")
def chunk_layer_of_rows(
    network: Network,
    kind: int,
    block: Params,
    own: tuple[Params, ...],
    index: Int[Array, ""],
    policies: tuple[Policy, ...],
    caches: tuple[LayerCache, ...],
    x: Float[Array, "B T D"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    totals: tuple[Int[Array, " 1"], ...],
) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
    """``chunk_layer`` of rows that have caches of their own, one row each: they share the model's weights.

    On one device. What each cache is after it, it would be after ``chunk_layer`` alone.
    """
    window, positions = network.windows[kind], positions_after(length, x[..., 0])

    def attend(_: int, heads: Heads, caches: tuple[LayerCache, ...]) -> tuple[Array, tuple[LayerCache, ...]]:
        outs, after = [], []
        for at, (policy, params, cache, total) in enumerate(zip(policies, own, caches, totals)):
            info = layer.LayerInfo(policy, params, index, network.num_layers, window, total, kind=kind)
            row = slice(at, at + 1)
            out, cache = layer.chunk(info, heads.of_rows(row), cache, length[row], count[row])
            outs.append(out)
            after.append(cache)
        return jnp.concatenate(outs), tuple(after)

    return network.layer(block, kind, x, positions, attend, caches)


@jax.jit
def after_rows(
    x: Float[Array, "B T D"], length: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[tuple[Int[Array, " 1"], Float[Array, "1 D"]], ...]:
    """Each row's length after a chunk, and the output of its last token."""
    newest = jnp.take_along_axis(x, (count - 1)[:, None, None], axis=1)[:, 0]
    rows = [slice(at, at + 1) for at in range(len(x))]
    return tuple((length[row] + count[row], newest[row]) for row in rows)


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
