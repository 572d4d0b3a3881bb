"""Prompts into a state: in chunks where the policy decides on arrival, else whole, layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import catalogue, layer, metrics
from kvjax.algebra import Frame, Policy
from kvjax.cache import pool
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import KVState, LayerCache
from kvjax.decode._capacity import CHUNK, bucket, empty, is_bounded, padded, prompt_pages, reserve
from kvjax.decode._checks import (
    Progress,
    Prompts,
    RequestError,
    check_continues,
    check_prompts,
    check_space,
    check_weights,
    read_prompts,
    tell_of_protected,
    tell_of_windows,
)
from kvjax.decode._step import at_layer, chunk_program, logits_of, with_confidence
from kvjax.types import EMPTY, Heads, Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def prefill(
    model: Weighted,
    policy: Policy | str,
    prompts: Prompts,
    *,
    context: int | None = None,
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
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
      progress: told how much is done.

    Raises:
      RequestError: an empty prompt, ids that the model has not, or more than it or ``context`` allows.
      PolicyError: a policy that cannot be read.
      WeightsError: a policy that learns without its weights, or weights that do not fit.

    Warns (``Remark``) where the model's own windows rule, and where the budget is below what is protected.
    """
    policy = catalogue.policy(policy)
    weights, network = check_weights(model, policy, weights), model.network
    tell_of_windows(network, policy)
    rows = read_prompts("prefill", model, prompts)
    lengths = [len(row) for row in rows]
    if context is None:
        context = bucket(max(lengths, default=0), network.max_positions)
    check_prompts("prefill", network, lengths, context)
    if chunk_size < 1:
        raise RequestError(f"prefill(chunk_size={chunk_size}) reads nothing. Give 1 token or more.")
    dtype = model.params["embed"].dtype
    tell_of_protected(network, policy, _frame(network, policy, dtype), lengths)
    state = empty(
        network, policy, rows=len(rows), context=context, dtype=dtype, page=page, chunk_size=chunk_size
    )
    state = dataclasses.replace(state, total=jax.device_put(np.asarray(lengths, np.int32)))
    if policy.whole_prompt:
        return _read_whole(model, policy, state, rows, weights, progress)
    return _read_chunks(model, policy, state, rows, weights, progress)


def _frame(network: Network, policy: Policy, dtype: jnp.dtype) -> Frame:
    """Where targets of the first layer are asked for, without a cache."""
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
      state: donated; made under a policy that differs from this one in dials alone.
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
    last: Array | None = None
    # Where everything is admitted, and all of it stays or a fixed number, the need is known: all of it at
    # once, one size, one program. (A share of the context is more than a shorter prompt can fill.)
    ahead = longest if policy.admission.idle and is_bounded(policy, state) else chunk_size
    for start in range(0, longest, chunk_size):
        count = np.clip(lengths - start, 0, chunk_size).astype(np.int32)
        state = reserve(policy, state, min(ahead, longest - start), chunk_size)
        piece = tokens[:, start : start + chunk_size]
        state, x = chunk_program(model.network, policy, model.params, weights, state, piece, count)
        last = x if last is None else jnp.where((count > 0)[:, None], x, last)
        if progress:
            jax.block_until_ready(x)  # reported is what is done, not what is asked for
            progress(min(start + chunk_size, longest), longest)
    state = metrics.with_peak(states.fit(metrics.with_peak(state)))
    assert last is not None  # noqa: S101  (at least one token was fed)
    logits = logits_of(model.network, model.params, last)
    return with_confidence(policy, state, logits, jax.device_put(lengths > 0)), logits


def _read_whole(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[np.ndarray],
    weights: Params,
    progress: Progress | None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Read whole prompts into an empty state that knows their lengths (``total``).

    Each layer is compressed before the next one runs.
    """
    network, params, total = model.network.at(state.context), model.params, state.total
    width = bucket(max(len(prompt) for prompt in prompts))
    positions = jnp.broadcast_to(jnp.arange(width), (len(prompts), width))
    x = network.embed(params, jnp.asarray(padded(prompts, width)), positions)
    caches = list(state.layers)
    for index, block in enumerate(params["layers"]):
        own = at_layer(policy, weights, index)
        cache, window = caches[index], network.windows[index]
        at = jnp.asarray(index)
        x, ranked, stored = _prompt_layer(
            network, policy, window, cache.ring.window, block, own, at, x, total
        )
        # The one look of the host between two layers.
        need = tuple(pool.coarse_class(pages) for pages in prompt_pages(policy, cache, np.asarray(stored)))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(ranked))
        before = metrics.allocated(tuple(caches))
        caches[index] = _store_layer(policy, network.num_layers, need, own, cache, ranked, at, total)
        state = metrics.raise_peak(state, whole, before + whole + metrics.allocated((caches[index],)))
        if progress:
            progress(index + 1, network.num_layers)
    # A buffer of its own: the state is donated, and no buffer can be donated twice.
    state = dataclasses.replace(state, layers=tuple(caches), length=jnp.copy(total))
    state = states.fit(metrics.with_peak(state))  # raises if a pool was too small
    last = jnp.take_along_axis(x, (total - 1)[:, None, None], axis=1)[:, 0]
    logits = logits_of(network, params, last)
    return with_confidence(policy, state, logits, jnp.ones(len(prompts), bool)), logits


@functools.partial(jax.jit, static_argnames=("network", "window", "ring"))
def _prompt_layer(
    network: Network,
    policy: Policy,
    window: int | None,
    ring: int,
    block: Params,
    weights: Params,
    index: Int[Array, ""],
    x: Float[Array, "B T D"],
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Entry, Int[Array, "B K"]]:
    """One layer over the whole prompt; ``index`` is traced, so that all layers share one program."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    pos = jnp.where(at < total[:, None], at, EMPTY)
    info = layer.LayerInfo(policy, weights, index, network.num_layers, window, total)

    def attend(_: int, heads: Heads, ranked: Entry | None) -> tuple[Array, Entry | None]:
        del ranked
        return layer.prompt(info, heads, pos)

    # Layers of one window share this program: the first of them stands for all.
    x, ranked = network.layer(block, network.windows.index(window), x, at, attend, None)
    assert ranked is not None  # noqa: S101  (attend has run)
    return x, ranked, layer.count_stored(ranked, total, ring)


@functools.partial(jax.jit, static_argnames=("num_layers", "pages"))
def _store_layer(
    policy: Policy,
    num_layers: int,
    pages: tuple[int, ...],
    weights: Params,
    cache: LayerCache,
    ranked: Entry,
    index: Int[Array, ""],
    total: Int[Array, " B"],
) -> LayerCache:
    """Store a ranked layer in pools of so many pages."""
    info = layer.LayerInfo(policy, weights, index, num_layers, None, total)
    cache = cache.with_pools([pool.resize(old, count) for old, count in zip(cache.pools, pages)])
    return layer.store(info, cache, ranked, total)
