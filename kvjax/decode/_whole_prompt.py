"""Prompts read whole, layer by layer: what a policy keeps of a layer is known once all queries are.

Why: kvjax/DESIGN.md, 8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import layer, metrics
from kvjax.algebra import Policy
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.ring import ENTRY, Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode._activations import PromptActivations, embed_prompts
from kvjax.decode._behind import Behind, prompt_layer_behind
from kvjax.decode._by_layer import (
    after_chunk,
    embed,
    layer_calls,
    no_output,
    outer,
    weights_by_layer,
)
from kvjax.decode._capacity import bucket, padded, prompt_pages
from kvjax.decode._checks import (
    warn_of_votes,
)
from kvjax.decode._replay import (
    cut_layer,
    hold_layer,
    padded_pieces,
    prompt_pieces,
    rank_layer,
    replay_layer,
    score_layer,
    share_slots,
)
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import HEADS, of_state
from kvjax.types import EMPTY, Heads, Network, Params, Weighted, of_layer

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt


class PromptPrograms(NamedTuple):
    """What ``read_layers`` runs: functions of these names, and the weights of each layer."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    store: Callable[..., Any]
    after: Callable[..., Any]
    by_layer: Callable[..., Any]
    hold: Callable[..., Any] = hold_layer
    replay: Callable[..., Any] = replay_layer
    cut: Callable[..., Any] = cut_layer
    rank: Callable[..., Any] = rank_layer
    score: Callable[..., Any] = score_layer
    share: Callable[..., Any] = share_slots
    behind: Callable[..., Any] = prompt_layer_behind


def read_layers(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[np.ndarray],
    weights: Params,
    seeds: UInt[np.ndarray, " B"] | None = None,
    *,
    reading: PromptActivations | None = None,
    fitted: bool = True,
    programs: PromptPrograms | None = None,
    missing: Callable[[Any, tuple[Any, ...]], Any] = lambda program, arguments: None,
    behind: Behind | None = None,
    keep: Callable[[Array, Array], None] = lambda k, v: None,
) -> Generator[Any, None, tuple[KVState, Float[Array, "B D"], Float[Array, "B T D"]]]:
    """Read whole prompts into an empty state that knows their lengths (``total``).

    Each layer is compressed before the next one runs; where the policy holds a prompt, after the last one.

    Args:
      model, policy, weights: as in ``prefill``.
      state: with empty pools, which are made as large as they must be.
      prompts: token ids.
      seeds: of the rows' requests; 0 without them.
      reading: of these prompts; nothing is attended to again.
      fitted: pools end at the smallest size class; else at a coarser one, which fewer programs meet.
      programs: the functions that run, as the caller compiled them.
      missing: called with the next of them and its arguments; what it returns, if anything, is yielded before
        the call, so that the caller may have the program made.
      behind: what is known of the only prompt: its beginning is not read (``queries_behind``).
      keep: called with each layer's keys and values [B, K, T, H] of whole prompts.

    Yields:
      (layers done, all layers), after each; a layer counts once for each time that it runs.

    Returns:
      The state, and the last layer's output of each row's last token and of all, padded.
    """
    network, params, total = model.network.at(state.context), model.params, state.total
    mesh = state.mesh
    run = programs or PromptPrograms(embed, prompt_layer, store_layer, after_chunk, weights_by_layer)
    begins: Any = state.length
    counts: Any = total
    width = 0
    if behind is not None:
        x, begins, counts, width = _rest(network, params, prompts[0], behind, run.embed)
    else:
        x = reading.inputs[0] if reading else embed_prompts(network, params, prompts, mesh, run.embed)
    caches, kept = list(state.layers), []
    draws = mesh.put(np.zeros(len(prompts), np.uint32) if seeds is None else seeds)
    calls = layer_calls(network, policy, params, weights, run.by_layer)
    rest = policy.after_prompt
    of_rest = {part.place for part in rest.learned}
    held: list[Any] = []
    targets: list[Any] = [None] * network.num_layers
    done, layers = 0, network.num_layers
    if policy.holds_prompt:
        pieces = padded_pieces(prompt_pieces("read_layers", model, policy, prompts))
        scored = reading.replayed.get(policy.eviction) if reading else None
        layers *= 2 + (0 if scored else len(pieces))
        for index, call in enumerate(calls):
            one, window = of_layer(network, index), network.windows[index]
            if policy.eviction.replays:
                out, cached = run.hold(one, window, call.block, x, total, mesh, bool(reading))
            else:
                lse = reading.lse[index] if reading else None
                out, cached = run.rank(one, policy, window, *call[1:], x, total, draws, mesh, lse)
            x = reading.inputs[index + 1] if reading else out
            held.append(cached)
            yield (done := done + 1), layers
        state = _with_full_cache(state, held, pieces)
        if scored:
            held = [(k, v, scores) for (k, v, _), scores in zip(held, scored)]
        for tokens, *numbers in () if scored else pieces:
            y = run.embed(network, outer(params), total, tokens, mesh)
            rows = [mesh.put(number) for number in numbers]
            for index, call in enumerate(calls):
                k, v, scores = held[index]
                kind = (of_layer(network, index), policy, network.windows[index], call.block, call.number)
                y, scores = run.replay(*kind, y, k, v, scores, total, *rows, mesh)
                held[index] = (k, v, scores)
                yield (done := done + 1), layers
        if reading and policy.eviction.replays:
            reading.replayed[policy.eviction] = [scores for *_, scores in held]
    whole_layers = [index for index, window in enumerate(network.windows) if window is None]
    if policy.budget.over_layers and whole_layers:
        for index in whole_layers if policy.eviction.replays else ():
            scores = run.score(
                of_layer(network, index), policy, *calls[index][1:], x, held[index], total, draws, mesh
            )
            held[index] = (*held[index][:2], scores)
        every = [held[index][2] for index in whole_layers]
        shared = run.share(policy, network.num_layers, held[0][0], every, total, mesh)
        targets = [shared.pop(0) if window is None else None for window in network.windows]
    for index, (_, block, own, at) in enumerate(calls):
        cache, window = caches[index], network.windows[index]
        where = (of_layer(network, index), policy, window, cache.ring.window, block, own, at)
        if held:
            ranked, stored, stays = run.cut(*where, x, held[index], total, draws, mesh, targets[index])
            held[index] = ()
        elif behind is not None:
            known = (*behind.keys[index], np.int32(behind.tokens))
            x, ranked, stored, stays = run.behind(*where, x, *known, total, draws, width)
        else:
            lse = reading.lse[index] if reading else None
            out, ranked, stored, stays = run.layer(*where, x, total, draws, mesh, lse)
            x = reading.inputs[index + 1] if reading else out
        kept += [stays] if window is None else []
        keep(ranked.k, ranked.v)
        # The one look of the host between two layers.
        fullest = [prompt_pages(policy, cache, own) for own in mesh.blocks(np.asarray(stored))]
        need = tuple(pool.coarse_class(max(pages)) for pages in zip(*fullest))
        whole = metrics.size((ranked, held))
        before = metrics.allocated(tuple(caches))
        own = {place: x for place, x in own.items() if place in of_rest}
        arguments = (rest, network.num_layers, need, own, cache, ranked, at, total, mesh)
        if (program := missing(run.store, arguments)) is not None:
            yield program
        caches[index] = run.store(*arguments)
        del arguments, ranked
        state = metrics.raise_peak(state, whole, before + whole + metrics.allocated((caches[index],)))
        yield (done := done + 1), layers
    length, last = run.after(x, begins, counts, no_output(model, state), mesh)
    state = dataclasses.replace(state, layers=tuple(caches), length=length)
    if policy.budget.voted:
        warn_of_votes(policy, [len(prompt) for prompt in prompts], jax.device_get(kept))
    state = metrics.with_peak(state)
    if fitted:
        return states.fit(state), last, x
    states.counts(state)  # as ``fit``, raises if a pool was too small
    return state, last, x


def _rest(
    network: Network, params: Params, prompt: np.ndarray, behind: Behind, run: Any
) -> tuple[Array, Int[np.ndarray, " 1"], Int[np.ndarray, " 1"], int]:
    """What goes into the first layer of the tokens behind a beginning; where they begin, how many; T."""
    begins, new = np.asarray([behind.tokens], np.int32), prompt[behind.tokens :]
    narrow, width = widths_behind(len(prompt), behind.tokens)
    x = run(network, outer(params), begins, padded([new], narrow), ONE)
    return x, begins, np.asarray([len(new)], np.int32), width


def widths_behind(tokens: int, known: int) -> tuple[int, int]:
    """Padded lengths of what is read behind so many known tokens, and of the whole prompt."""
    narrow = bucket(tokens - known)
    return narrow, bucket(max(tokens, known + narrow))


def _with_full_cache(
    state: KVState, held: Sequence[layer.Held], pieces: Sequence[tuple[np.ndarray, ...]]
) -> KVState:
    """The state whose peak counts a full cache, and a piece's keys and values of a layer, if there is one."""
    k = held[0][0]
    piece = 2 * pieces[0][0].size * k.shape[1] * k.shape[3] * k.dtype.itemsize if pieces else 0
    full = metrics.size(held) + piece
    return metrics.raise_peak(state, full, metrics.allocated(state.layers) + full)


@functools.partial(jax.jit, static_argnames=("network", "window", "ring", "mesh"))
def prompt_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
    seeds: UInt[Array, " B"],
    mesh: Mesh = ONE,
    lse: Float[Array, "B N T"] | None = None,
) -> tuple[Float[Array, "B T D"] | None, Entry, Int[Array, "B K"], Int[Array, "B K"]]:
    """One layer over the whole prompt; ``index`` is traced, so that all layers share one program.

    If ``lse`` is given, attention was computed before: only the projections run, and the output is None.

    Returns:
      The layer's output, the ranked tokens, how many of them pages will hold, and how many stay in all.
    """
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    info = layer.LayerInfo(policy, weights, index, network.num_layers, window, total, seeds=seeds)

    def run(info: layer.LayerInfo, heads: Heads, lse: Array | None, pos: Array) -> tuple[Array, Any]:
        if lse is None:
            out, ranked = layer.prompt(info, heads, pos)
        else:
            # What the model computes from this is dead code.
            out, ranked = jnp.zeros_like(heads.q), layer.judge(info, heads, pos, lse)
        return out, (ranked, layer.count_stored(ranked, info.total, ring), ranked.admit.sum(axis=-1))

    attend = layer.attention(run, lambda _: info, mesh, (pos,), lambda _: (ENTRY, HEADS, HEADS))
    # Layers of one window share this program: the first of them stands for all.
    carry: Any = lse
    x, (ranked, *counts) = network.layer(block, network.windows.index(window), x, at, attend, carry)
    stored, stays = mesh.everywhere(counts)
    return None if lse is not None else mesh.by_row(x), ranked, stored, stays


@functools.partial(jax.jit, static_argnames=("num_layers", "pages", "mesh"))
def store_layer(
    policy: Policy,
    num_layers: int,
    pages: tuple[int, ...],
    weights: Params,
    cache: LayerCache,
    ranked: Entry,
    index: Int[Array, ""],
    total: Int[Array, " B"],
    mesh: Mesh = ONE,
) -> LayerCache:
    """Store a ranked layer in pools of so many pages."""
    info = layer.LayerInfo(policy, weights, index, num_layers, None, total)

    def store(info: layer.LayerInfo, _: None, carry: tuple[LayerCache, Entry]) -> LayerCache:
        cache, ranked = carry
        cache = cache.with_pools([pool.resize(old, count) for old, count in zip(cache.pools, pages)])
        return layer.store(info, cache, ranked, info.total)

    return layer.on_devices(store, info, None, (cache, ranked), mesh, out=of_state(cache))  # type: ignore[no-any-return]
