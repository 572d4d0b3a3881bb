"""Prompts into a state: in chunks where the policy decides on arrival, else whole, layer by layer.

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

from kvjax import catalogue, layer, metrics
from kvjax.algebra import Frame, Policy
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.ring import ENTRY, Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode._activations import PromptActivations, embed_prompts
from kvjax.decode._behind import Behind, prompt_layer_behind
from kvjax.decode._by_layer import (
    after_chunk,
    embed,
    last_logits,
    layer_calls,
    outer,
    read_chunk,
    weights_by_layer,
)
from kvjax.decode._capacity import CHUNK, bucket, empty, is_bounded, padded, prompt_pages, reserve
from kvjax.decode._checks import (
    Progress,
    Prompts,
    RequestError,
    check_continues,
    check_policy,
    check_prompts,
    check_sizes,
    check_space,
    check_weights,
    read_policy,
    read_prompts,
    read_seeds,
    warn_of_lengths,
    warn_of_nothing_admitted,
    warn_of_protected,
    warn_of_votes,
    warn_of_windows,
)
from kvjax.decode._placement import check_same_call, mesh_for, on_mesh, warn_of_imbalance
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
from kvjax.decode._step import after_prompt
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.sharding.specs import HEADS, of_state
from kvjax.types import EMPTY, Heads, Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt


def prefill(
    model: Weighted,
    policy: Policy | str,
    prompts: Prompts,
    *,
    context: int | None = None,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
    seeds: int | Sequence[int] = 0,
    mesh: Mesh | str | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Read the prompts; the compressed state and the logits of each row's next token.

    Policies that decide on arrival read in chunks, in bounded memory; policies that score after full
    attention read the whole prompt layer by layer, each layer compressed before the next one runs.

    Args:
      model: a network and its weights.
      policy: what to keep, also in the one-string form.
      prompts: token ids per row, any lengths of at least 1; or one row of them, a text per row, one text.
      context: most tokens a row will ever see (prompt and new ones), at most the model's positions; by
        default the prompts' size class.
      chunk_size: tokens a chunk.
      page: slots of a page; by default ``page_size`` chooses.
      weights: learned weights, for policies that have some: ``kvjax.weights_for(policy, model)``.
      seeds: of the requests, for all rows or one a row; policies that draw (``gvote``) draw by a request's
        own, never by its place in the batch.
      mesh: devices for the state ("data=2,tensor=4", ``kvjax.mesh``); by default those that the model was
        loaded on. A model that lies elsewhere is moved there for this call.
      progress: called with (done, all) as the work proceeds.

    Raises:
      RequestError: an empty prompt, ids that the model has not, more than it or ``context`` allows, wrong
        seeds, a chunk or a page longer than its positions.
      PolicyError: a policy that cannot be read, or has numbers beyond the model's positions.
      WeightsError: a policy that learns without its weights, or weights that do not fit.
      MeshError: a mesh that does not divide the rows, or the model's heads; too few devices; processes that
        make different calls.

    Warns (``Remark``) where the model's own windows rule, where the budget is below what is protected, where
    a budget that is voted keeps all of a prompt or has one token to judge by, where a learned threshold
    admits nothing, and where the devices of a mesh hold unequally much.
    """
    rows = read_prompts("prefill", model, prompts)
    policy = read_policy(policy, model, prompt=max(map(len, rows), default=0))
    weights, network = check_weights(model, policy, weights), model.network
    warn_of_windows(network, policy)
    mesh = mesh_for("prefill", model, mesh, len(rows))
    lengths = [len(row) for row in rows]
    if context is None:
        context = bucket(max(lengths, default=0), network.max_positions)
    check_prompts("prefill", network, lengths, context)
    check_sizes("prefill", network, chunk_size, page)
    prompt_pieces("prefill", model, policy, rows)
    dtype = model.params["embed"].dtype
    warn_of_protected(network, policy, _frame(network, policy, dtype), lengths)
    warn_of_lengths(policy, weights, lengths)
    numbers = (context, chunk_size, page, seeds)
    check_same_call("prefill", mesh, policy, weights, {"the prompts": rows, "the sizes and seeds": numbers})
    model, weights = on_mesh(model, policy, weights, mesh)
    sizes: dict[str, Any] = {"rows": len(rows), "context": context, "page": page, "chunk_size": chunk_size}
    state = empty(network, policy, **sizes, dtype=dtype, mesh=mesh)
    state = dataclasses.replace(state, total=mesh.put(np.asarray(lengths, np.int32)))
    drawn = read_seeds("prefill", seeds, len(rows))
    if policy.whole_prompt:
        reading = read_layers(model, policy, state, rows, weights, drawn)
        state, logits = _finished(model, policy, reading, len(rows), progress)
    else:
        state, logits = _read_chunks(model, policy, state, rows, weights, progress)
    warn_of_imbalance(state)
    warn_of_nothing_admitted(policy, state, lengths)
    return state, logits


def cuts_after(policy: Policy) -> bool:
    """Is a prompt read with full attention and cut afterwards? Then ``cut`` serves it."""
    return policy.whole_prompt and (policy.admission.idle or not policy.admission.prefill)


def cut(
    model: Weighted,
    policy: Policy | str,
    reading: PromptActivations,
    *,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
    seeds: int | Sequence[int] = 0,
) -> tuple[KVState, Float[Array, "B V"]]:
    """``prefill`` of prompts that were read before, under a policy that cuts afterwards.

    Args:
      model, policy, chunk_size, page, weights, seeds: as in ``prefill``.
      reading: of the same model; left as it is.

    Raises:
      RequestError: a policy that decides while it reads; wrong seeds.
      PolicyError, WeightsError: as ``prefill``.
    """
    policy = check_policy(catalogue.policy(policy), model.network)
    check_sizes("cut", model.network, chunk_size, page)
    if not cuts_after(policy):
        raise RequestError(f"cut({policy!r}) decides while a prompt is read. Prefill under it.")
    prompt_pieces("cut", model, policy, reading.prompts)
    weights, rows = check_weights(model, policy, weights), len(reading.prompts)
    mesh = mesh_for("cut", model, None, rows)
    weights = on_mesh(model, policy, weights, mesh)[1]
    state = empty(
        model.network,
        policy,
        rows=rows,
        context=reading.context,
        dtype=model.params["embed"].dtype,
        page=page,
        chunk_size=chunk_size,
        mesh=mesh,
    )
    lengths = np.asarray([len(prompt) for prompt in reading.prompts], np.int32)
    state = dataclasses.replace(state, total=mesh.put(lengths))
    drawn = read_seeds("cut", seeds, rows)
    layers = read_layers(model, policy, state, reading.prompts, weights, drawn, reading=reading)
    return _finished(model, policy, layers, rows, None)


def _frame(network: Network, policy: Policy, dtype: jnp.dtype) -> Frame:
    """The frame of the first layer's budget, without a cache."""
    k: Any = jax.ShapeDtypeStruct((1, network.num_kv_heads, 1, network.head_dim), dtype)
    total: Any = None
    return layer.LayerInfo(policy, {}, 0, network.num_layers, None, total).frame(k)


def extend(
    model: Weighted,
    policy: Policy | str,
    state: KVState,
    prompts: Prompts,
    *,
    weights: Params | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed more tokens to a state, chunk by chunk (``state.chunk``); rows may differ in length.

    Args:
      model, policy, weights, progress: as in ``prefill``.
      state: donated; made under a policy that differs from this one in traced
        hyperparameters alone.
      prompts: as in ``prefill``, texts without BOS; an empty row is left as it is and its logits are
        meaningless.

    Raises:
      RequestError: nothing to feed, another number of rows, ids that the model has not, more tokens than it
        or ``state.context`` allows, a state of another policy, or one that was donated before.
    """
    policy = catalogue.policy(policy)
    weights = check_weights(model, policy, weights)
    check_continues("extend", model.network, policy, state, state.chunk)
    rows = read_prompts("extend", model, prompts, begins=False)
    check_space("extend", model.network, state, np.asarray([len(row) for row in rows]))
    check_same_call("extend", state.mesh, policy, weights, {"the prompts": rows})
    model, weights = on_mesh(model, policy, weights, state.mesh)
    return _read_chunks(model, policy, state, rows, weights, progress)


def _read_chunks(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[np.ndarray],
    weights: Params,
    progress: Progress | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """``extend``, of arguments that are checked."""
    lengths, chunk_size = np.asarray([len(prompt) for prompt in prompts]), state.chunk
    longest = int(lengths.max())
    tokens = padded(prompts, -(-longest // chunk_size) * chunk_size)
    rest, own, _ = after_prompt(policy, weights, state)
    last, calls = _no_output(model, state), layer_calls(model.network, rest, model.params, own)
    # Where everything is admitted, and all of it stays or a fixed number, the need is known: all of it at
    # once, one size, one program. (A share of the context is more than a shorter prompt can fill.)
    ahead = longest if policy.admission.idle and is_bounded(policy, state) else chunk_size
    for start in range(0, longest, chunk_size):
        count = np.clip(lengths - start, 0, chunk_size).astype(np.int32)
        state = reserve(policy, state, min(ahead, longest - start), chunk_size)
        piece = tokens[:, start : start + chunk_size]
        state, last, _ = read_chunk(model.network, rest, model.params, calls, state, piece, count, last)
        if progress:
            jax.block_until_ready(last)  # reported is what is done, not what is asked for
            progress(min(start + chunk_size, longest), longest)
    state = metrics.with_peak(states.fit(metrics.with_peak(state)))
    return with_logits(model, policy, state, last, state.mesh.put(lengths > 0))


def _finished(
    model: Weighted,
    policy: Policy,
    reading: Generator[tuple[int, int], None, tuple[KVState, Array, Array]],
    rows: int,
    progress: Progress | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """What ``read_layers`` comes to."""
    while True:
        try:
            done = next(reading)
        except StopIteration as end:
            state, last, _ = end.value
            return with_logits(model, policy, state, last, state.mesh.put(np.ones(rows, bool)))
        if progress:
            progress(*done)


def _no_output(model: Weighted, state: KVState) -> Float[Array, "B D"]:
    """The output of rows that were fed no token."""
    embed = model.params["embed"]
    return state.mesh.put(np.zeros((state.rows, embed.shape[1]), embed.dtype))


def with_logits(
    model: Weighted,
    policy: Policy,
    state: KVState,
    last: Float[Array, "B D"],
    fed: Bool[Array, " B"],
    run: Any = last_logits,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Logits of the rows' last outputs, and the state that knows what the budget reads off them.

    ``run`` is ``last_logits``, as the caller compiled it.
    """
    known = (last, state.confidence, fed, state.mesh)
    logits, confidence = run(model.network, policy.after_prompt, outer(model.params), *known)
    return dataclasses.replace(state, confidence=confidence), logits


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
        layers *= 2 + len(pieces)
        for index, call in enumerate(calls):
            window = network.windows[index]
            if policy.eviction.replays:
                out, cached = run.hold(network, window, call.block, x, total, mesh, bool(reading))
            else:
                lse = reading.lse[index] if reading else None
                out, cached = run.rank(network, policy, window, *call[1:], x, total, draws, mesh, lse)
            x = reading.inputs[index + 1] if reading else out
            held.append(cached)
            yield (done := done + 1), layers
        state = _with_full_cache(state, held, pieces)
        for tokens, *numbers in pieces:
            y = run.embed(network, outer(params), total, tokens, mesh)
            rows = [mesh.put(number) for number in numbers]
            for index, call in enumerate(calls):
                k, v, scores = held[index]
                kind = (network, policy, network.windows[index], call.block, call.number)
                y, scores = run.replay(*kind, y, k, v, scores, total, *rows, mesh)
                held[index] = (k, v, scores)
                yield (done := done + 1), layers
    whole_layers = [index for index, window in enumerate(network.windows) if window is None]
    if policy.budget.over_layers and whole_layers:
        for index in whole_layers if policy.eviction.replays else ():
            scores = run.score(network, policy, *calls[index][1:], x, held[index], total, draws, mesh)
            held[index] = (*held[index][:2], scores)
        every = [held[index][2] for index in whole_layers]
        shared = run.share(policy, network.num_layers, held[0][0], every, total, mesh)
        targets = [shared.pop(0) if window is None else None for window in network.windows]
    for index, (_, block, own, at) in enumerate(calls):
        cache, window = caches[index], network.windows[index]
        where = (network, policy, window, cache.ring.window, block, own, at)
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
    length, last = run.after(x, begins, counts, _no_output(model, state), mesh)
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
