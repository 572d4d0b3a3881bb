"""Prompts into a state: in chunks where the policy decides on arrival, else whole, layer by layer.

Why: kvjax/DESIGN.md, 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import catalogue, layer, metrics
from kvjax.algebra import Frame, Policy
from kvjax.cache import state as states
from kvjax.cache.state import KVState
from kvjax.decode._activations import PromptActivations
from kvjax.decode._by_layer import (
    last_logits,
    layer_calls,
    no_output,
    outer,
    read_chunk,
)
from kvjax.decode._capacity import CHUNK, bucket, empty, is_bounded, padded, reserve
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
    warn_of_windows,
)
from kvjax.decode._placement import check_same_call, mesh_for, on_mesh, warn_of_imbalance
from kvjax.decode._replay import (
    prompt_pieces,
)
from kvjax.decode._step import after_prompt
from kvjax.decode._whole_prompt import read_layers
from kvjax.sharding.mesh import Mesh
from kvjax.types import Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


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
      reading: of the same model; keeps the scores of an eviction that replays, for its other budgets.

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
    last, calls = no_output(model, state), layer_calls(model.network, rest, model.params, own)
    # Where everything is admitted, and all of it stays or a fixed number, the need is known: all of it at
    # once, one size, one program. (A share of the context is more than a shorter prompt can fill.)
    known = policy.admission.idle and is_bounded(policy, state)
    ahead = longest if known and not state.hosted else chunk_size
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
