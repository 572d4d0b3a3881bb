"""Prompts that are held whole: a full cache, pieces behind it or scores beside it, the cut of all layers.

Why: kvjax/DESIGN.md, 28.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer
from kvjax.algebra import Piece, Policy
from kvjax.cache.ring import ENTRY, Entry
from kvjax.decode._capacity import bucket
from kvjax.decode._checks import RequestError, read_ids
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import HEADS
from kvjax.types import EMPTY, Heads, Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt

    from kvjax.text import Text


def prompt_pieces(
    call: str, model: Weighted, policy: Policy, prompts: Sequence[Int[np.ndarray, " T"]]
) -> list[list[Piece]]:
    """What is fed behind each prompt; nothing where the eviction does not replay.

    Raises:
      PolicyError: an instruction in words for a model without a tokenizer.
      RequestError: an instruction that the model cannot read, or more positions than it was trained for.
    """
    if not policy.eviction.replays:
        return [[] for _ in prompts]
    text, most = _text(model), model.network.max_positions
    pieces = [policy.eviction.pieces(prompt, text) for prompt in prompts]
    for row, (prompt, own) in enumerate(zip(prompts, pieces)):
        for piece in own:
            read_ids(f"{call}: the instruction of {policy.eviction!r}", model, piece.tokens)
            again = piece.end - piece.begin
            if len(prompt) + len(piece.tokens) > most:
                asks = len(piece.tokens) - again
                raise RequestError(
                    f"{call}: row {row} needs {len(prompt) + len(piece.tokens)} positions, for a prompt of "
                    f"{len(prompt)} tokens, {asks} of instruction and {again} of the prompt once more, and "
                    f"the model was trained for {most}. Shorten the prompt, or the pieces of "
                    f"{policy.eviction!r}."
                )
    return pieces


def _text(model: Weighted) -> Text | None:
    """The model's tokenizer; None without one, which an instruction in ids does not need."""
    try:
        return getattr(model, "text", None)
    except ValueError:
        return None


def padded_pieces(
    pieces: Sequence[Sequence[Piece]],
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Round by round: tokens [B, P] of each row's piece, how many are real, and what they repeat [B]."""
    width = bucket(max((len(piece.tokens) for own in pieces for piece in own), default=1))
    rounds = []
    for at in range(max(map(len, pieces), default=0)):
        tokens = np.zeros((len(pieces), width), np.int32)
        numbers = np.zeros((3, len(pieces)), np.int32)
        for row, own in enumerate(pieces):
            if at < len(own):
                tokens[row, : len(own[at].tokens)] = own[at].tokens
                numbers[:, row] = len(own[at].tokens), own[at].begin, own[at].end
        rounds.append((tokens, *numbers))
    return rounds


@functools.partial(jax.jit, static_argnames=("network", "window", "mesh", "known"))
def hold_layer(
    network: Network,
    window: int | None,
    block: Params,
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
    mesh: Mesh = ONE,
    known: bool = False,
) -> tuple[Float[Array, "B T D"] | None, layer.Held]:
    """One layer over whole prompts under the model's own attention: its output and its full cache.

    If the output is ``known``, only the projections run, and it is None.
    """
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    info = layer.LayerInfo(Policy(), {}, 0, network.num_layers, window, total)

    def run(info: layer.LayerInfo, heads: Heads, _: None, pos: Array) -> tuple[Array, layer.Held]:
        if known:  # what the model computes from this is dead code
            return jnp.zeros_like(heads.q), layer.hold(heads)
        return layer.attend_prompt(heads, pos, info.total, info.window)[0], layer.hold(heads)

    attend = layer.attention(run, lambda _: info, mesh, (pos,), lambda _: (HEADS, HEADS, HEADS))
    carry: Any = None
    x, held = network.layer(block, network.windows.index(window), x, at, attend, carry)
    return None if known else mesh.by_row(x), held


@functools.partial(jax.jit, static_argnames=("network", "window", "mesh"), donate_argnames="scores")
def replay_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    block: Params,
    index: Int[Array, ""],
    x: Float[Array, "B P D"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    scores: Float[Array, "B K T"],
    total: Int[Array, " B"],
    count: Int[Array, " B"],
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    mesh: Mesh = ONE,
) -> tuple[Float[Array, "B P D"], Float[Array, "B K T"]]:
    """One layer over a piece behind the prompts: its output, and the scores after it."""
    ahead = jnp.arange(x.shape[1])
    at = total[:, None] + ahead
    pos = jnp.where(ahead < count[:, None], at, EMPTY)
    info = layer.LayerInfo(policy, {}, index, network.num_layers, window, total)
    attend = layer.attention(layer.replay, lambda _: info, mesh, (pos, begin, end), lambda _: HEADS)
    carry: Any = (k, v, scores)
    x, scores = network.layer(block, network.windows.index(window), x, at, attend, carry)
    return mesh.by_row(x), scores


@functools.partial(jax.jit, static_argnames=("network", "window", "mesh"))
def rank_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
    seeds: UInt[Array, " B"],
    mesh: Mesh = ONE,
    lse: Float[Array, "B N T"] | None = None,
) -> tuple[Float[Array, "B T D"] | None, layer.Held]:
    """``hold_layer`` for an eviction that needs no second pass: with the scores of the prompt's tokens.

    If ``lse`` is given, attention was computed before: only the projections run, and the output is None.
    """
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    info = layer.LayerInfo(policy, weights, index, network.num_layers, window, total, seeds=seeds)

    def run(info: layer.LayerInfo, heads: Heads, lse: Array | None, pos: Array) -> tuple[Array, layer.Held]:
        out = jnp.zeros_like(heads.q)
        if lse is None:
            out, lse = layer.attend_prompt(heads, pos, info.total, info.window)
        return out, layer.hold_scored(info, heads, pos, lse)

    attend = layer.attention(run, lambda _: info, mesh, (pos,), lambda _: (HEADS, HEADS, HEADS))
    carry: Any = lse
    x, held = network.layer(block, network.windows.index(window), x, at, attend, carry)
    return None if lse is not None else mesh.by_row(x), held


@functools.partial(jax.jit, static_argnames=("layers", "mesh"))
def share_slots(
    policy: Policy,
    layers: int,
    k: Float[Array, "B K T H"],
    scores: Sequence[Float[Array, "B K T"]],
    total: Int[Array, " B"],
    mesh: Mesh = ONE,
) -> list[Int[Array, "B K"]]:
    """Slots of each KV head of the layers that were scored; ``k`` is of any of them.

    On a mesh the compiler adds up over devices: one threshold for all.
    """
    info = layer.LayerInfo(policy, {}, 0, layers, None, total)
    targets = policy.budget.targets_of_layers(info.frame(k), total, scores)
    return [mesh.pinned(one, HEADS) for one in targets]


@functools.partial(jax.jit, static_argnames=("network", "mesh"))
def score_layer(
    network: Network,
    policy: Policy,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    held: layer.Held,
    total: Int[Array, " B"],
    seeds: UInt[Array, " B"],
    mesh: Mesh = ONE,
) -> Float[Array, "B K T"]:
    """What the eviction makes of a layer after all pieces; arguments as of ``cut_layer``."""

    def run(info: layer.LayerInfo, heads: Heads, held: layer.Held, pos: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(heads.q), layer.scores_of_pieces(info, heads, held, pos)

    where = (network, policy, None, block, weights, index, x, held, total, seeds, mesh)
    return _of_held(run, held, HEADS, *where)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnames=("network", "window", "ring", "mesh"))
def cut_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    held: layer.Held,
    total: Int[Array, " B"],
    seeds: UInt[Array, " B"],
    mesh: Mesh = ONE,
    target: Int[Array, "B K"] | None = None,
) -> tuple[Entry, Int[Array, "B K"], Int[Array, "B K"]]:
    """The ranked tokens of a layer after all pieces, how many pages will hold, and how many stay in all.

    ``x`` is any array of its shape: the layer runs for its weights alone. ``target`` is what ``share_slots``
    says of the layer, whose ``held`` are then ``scores``.
    """

    def run(
        info: layer.LayerInfo, heads: Heads, carry: tuple[layer.Held, Array | None], pos: Array
    ) -> tuple[Array, Any]:
        ranked = layer.judge_held(info, heads, carry[0], pos, carry[1])
        counts = layer.count_stored(ranked, info.total, ring), ranked.admit.sum(axis=-1)
        return jnp.zeros_like(heads.q), (ranked, *counts)

    where = (network, policy, window, block, weights, index, x, held, total, seeds, mesh)
    ranked, *counts = _of_held(run, (held, target), (ENTRY, HEADS, HEADS), *where)
    stored, stays = mesh.everywhere(counts)
    return ranked, stored, stays


def _of_held(
    run: Any,
    carry: Any,
    out: Any,
    network: Network,
    policy: Policy,
    window: int | None,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    held: layer.Held,
    total: Int[Array, " B"],
    seeds: UInt[Array, " B"],
    mesh: Mesh,
) -> Any:
    """What ``run`` makes of a layer's full cache, with the layer's weights."""
    t = held[0].shape[2]
    pos = jnp.where(jnp.arange(t) < total[:, None], jnp.arange(t), EMPTY)
    info = layer.LayerInfo(policy, weights, index, network.num_layers, window, total, seeds=seeds)
    attend = layer.attention(run, lambda _: info, mesh, (pos,), lambda _: out)
    at = jnp.zeros((len(x), 1), jnp.int32)
    return network.layer(block, network.windows.index(window), x[:, :1], at, attend, carry)[1]
