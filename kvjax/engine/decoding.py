"""The program of a running batch: a few decode steps of every row; each row samples as its request says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.decode import Tally
from kvjax.engine.request import MOST_LOGPROBS
from kvjax.layer import by_rows
from kvjax.sampling import Sampling, sample
from kvjax.types import EMPTY, Network, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """What the rows of a running batch feed next.

    Attributes:
      token: the last token of each row, written out but not yet fed; int [B].
      active: rows that are to be written on, bool [B].
      left: tokens each row may still write, int [B].
      stops: ids that end a row, EMPTY-padded, int [B, Z].
      ranked: whether a row wants log-probabilities, bool [B].
      how: sampling parameters.
      steps: most steps, up to those of the program; traced, so that fewer compile nothing.
    """

    token: Any
    active: Any
    left: Any
    stops: Any
    ranked: Any
    how: Sampling
    steps: Any


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Tokens that were drawn; EMPTY where a row had ended. T of each row, or one of each without that axis.

    Attributes:
      token: the ids, int [B, T].
      logprob: the model's log-probability of each, float [B, T]; anything in rows that did not ask.
      best: the likeliest ids there, best first, int [B, T, X].
      logprobs: theirs, float [B, T, X].
    """

    token: Any
    logprob: Any
    best: Any
    logprobs: Any


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the host knows of a state between two programs.

    Attributes:
      seen: tokens of each row, int [B].
      lists: live slots of each list, int [B, K, R], of every pool of every layer in turn.
      free: free pages of these pools; of each device where there are several.
      overflow: whether one of them lost a token.
    """

    seen: Any
    lists: tuple[Any, ...]
    free: tuple[Any, ...]
    overflow: Any


def snapshot_of(state: KVState) -> Snapshot:
    """The snapshot of a state. Pure."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    return Snapshot(
        seen=state.length,
        lists=tuple(pages.length for pages in pools),
        free=tuple(pages.n_free for pages in pools),
        overflow=jnp.any(jnp.stack([jnp.asarray(False), *(jnp.any(pages.overflow) for pages in pools)])),
    )


def snapshot(state: KVState) -> Snapshot:
    """``snapshot_of`` a state, on the host; runs no program."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    seen, rest = jax.device_get((state.length, [(p.length, p.n_free, p.overflow) for p in pools]))
    return Snapshot(
        seen=seen,
        lists=tuple(x[0] for x in rest),
        free=tuple(x[1] for x in rest),
        overflow=np.asarray(any(x[2].any() for x in rest)),
    )


def nothing_held(state: KVState) -> Snapshot:
    """``snapshot`` of a state that holds nothing, by its shapes."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    free = [np.full(p.n_free.shape, p.count // state.mesh.pools, np.int32) for p in pools]
    return Snapshot(
        seen=np.zeros(state.length.shape, np.int32),
        lists=tuple(np.zeros(p.length.shape, np.int32) for p in pools),
        free=tuple(free),
        overflow=np.asarray(False),
    )


def decode_steps(
    network: Network,
    policies: Policy,
    steps: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: BatchInputs,
) -> tuple[KVState, SampledTokens, Snapshot]:
    """Up to ``steps`` tokens of every active row. Pure; to be compiled.

    Args:
      network, params, weights: as in ``kvjax.decode.step``.
      policies: those of all rows, stacked (``layer.stack_policies``).
      steps: static.
      state: donated; with free pages for whatever comes.
      rows: what each row feeds next, and how it samples.
    """
    policy, drawn = by_rows(policies), nothing_drawn(state.rows, steps, params)

    def step(state: KVState, rows: BatchInputs) -> tuple[KVState, Array]:
        return decode.step(network, policy, params, weights, state, rows.token, rows.active)

    def advance(rows: BatchInputs, logits: Array, state: KVState) -> tuple[BatchInputs, SampledTokens]:
        fresh = draw(logits, rows.how, rows.ranked, state.length)
        token = jnp.where(rows.active, fresh.token, rows.token)
        written = dataclasses.replace(fresh, token=jnp.where(rows.active, fresh.token, EMPTY))
        left = rows.left - rows.active
        active = rows.active & (left > 0) & ~jnp.any(token[:, None] == rows.stops, axis=-1)
        how = rows.how.after(token, state.length, rows.active)
        return dataclasses.replace(rows, token=token, left=left, active=active, how=how), written

    state, _, drawn = decode.decode_loop(step, advance, state, rows, drawn, rows.steps)
    return state, drawn, snapshot_of(state)


def drafted_steps(
    network: Network,
    policies: Policy,
    steps: int,
    length: int,
    params: Params,
    weights: Params,
    state: KVState,
    rows: BatchInputs,
) -> tuple[KVState, SampledTokens, Snapshot, Tally]:
    """``decode_steps`` by drafts of ``length`` tokens, which full reads verify. Pure; to be compiled.

    Args:
      network, policies, steps, params, weights, state, rows: as in ``decode_steps``.
      length: tokens drafted in a round; static.

    Returns:
      As ``decode_steps``, and what became of each row's drafts.
    """
    policy, batch = by_rows(policies), state.rows
    at_row, ranked = jnp.arange(batch)[:, None], rows.ranked
    own = decode.DecodeRows(
        token=rows.token, done=~rows.active, left=rows.left, stops=rows.stops, how=rows.how
    )

    def any_left(carry: tuple[KVState, decode.DecodeRows, Any, Array, Tally]) -> Array:
        _, own, _, written, _ = carry
        return jnp.any(own.active & (written < rows.steps))

    def once(carry: tuple[KVState, decode.DecodeRows, Any, Array, Tally]) -> Any:
        state, own, drawn, written, tally = carry
        state, own, token, seen, logits = decode.round_of(
            network, policy, length, params, weights, state, own, rows.steps - written
        )
        ranks = [ranks_of(logits[:, i], token[:, i], ranked) for i in range(token.shape[1])]
        fresh: Any = jax.tree.map(lambda *of_tokens: jnp.stack(of_tokens, axis=1), *ranks)
        at = jnp.where(token >= 0, written[:, None] + jnp.arange(token.shape[1]), steps)
        drawn = jax.tree.map(lambda x, new: x.at[at_row, at].set(new, mode="drop"), drawn, fresh)
        return state, own, drawn, written + (token >= 0).sum(axis=1), jax.tree.map(jnp.add, tally, seen)

    nothing = nothing_drawn(batch, steps, params)
    carry = (state, own, nothing, jnp.zeros(batch, jnp.int32), Tally.zero(batch))
    state, _, drawn, _, tally = jax.lax.while_loop(any_left, once, carry)
    return state, drawn, snapshot_of(state), tally


def ranks_of(
    logits: Float[Array, "B V"], token: Int[Array, " B"], ranked: Bool[Array, " B"]
) -> SampledTokens:
    """Tokens that were drawn, with log-probabilities where a row wants them. Pure."""
    logprob, best, logprobs = log_probabilities(logits, jnp.maximum(token, 0), ranked)
    return SampledTokens(token=token, logprob=logprob, best=best, logprobs=logprobs)


def nothing_drawn(rows: int, steps: int, params: Params) -> SampledTokens:
    """Room for so many tokens of each row."""
    some = min(MOST_LOGPROBS, params["embed"].shape[0])
    return SampledTokens(
        token=jnp.full((rows, steps), EMPTY, jnp.int32),
        logprob=jnp.zeros((rows, steps), jnp.float32),
        best=jnp.zeros((rows, steps, some), jnp.int32),
        logprobs=jnp.zeros((rows, steps, some), jnp.float32),
    )


def guided_step(
    network: Network,
    policies: Policy,
    params: Params,
    weights: Params,
    state: KVState,
    token: Int[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[KVState, Float[Array, "B V"], Int[Array, " B"], Snapshot]:
    """A token of every active row is fed; what follows it is drawn by ``guided_draw``. Pure.

    Returns:
      The state, the logits, the position of the token that follows, and the snapshot.
    """
    state, logits = decode.step(network, by_rows(policies), params, weights, state, token, active)
    return state, logits, state.length + 0, snapshot_of(state)


def guided_draw(
    logits: Float[Array, "B V"],
    how: Sampling,
    ranked: Bool[Array, " B"],
    position: Int[Array, " B"],
    active: Bool[Array, " B"],
    allowed: UInt[Array, "B W"],
) -> SampledTokens:
    """``draw`` among the tokens whose bit is set (``Guide.allowed``); arrays are [B, 1, ...]. Pure."""
    ids = jnp.arange(logits.shape[1])
    may = (allowed[:, ids // 32] >> (ids % 32).astype(allowed.dtype)) & 1
    token = sample(jnp.where(may > 0, logits, -jnp.inf), how, position)
    logprob, best, logprobs = log_probabilities(logits, token, ranked)
    token = jnp.where(active, token, EMPTY)
    drawn = SampledTokens(token=token, logprob=logprob, best=best, logprobs=logprobs)
    return jax.tree.map(lambda x: x[:, None], drawn)


def draw(
    logits: Float[Array, "B V"], how: Sampling, ranked: Bool[Array, " B"], position: Int[Array, " B"]
) -> SampledTokens:
    """One token per row, which will stand at ``position``; log-probabilities where a row wants them. Pure."""
    token = sample(logits, how, position)
    logprob, best, logprobs = log_probabilities(logits, token, ranked)
    return SampledTokens(token=token, logprob=logprob, best=best, logprobs=logprobs)


def log_probabilities(
    logits: Float[Array, "B V"], token: Int[Array, " B"], ranked: Bool[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B X"], Float[Array, "B X"]]:
    """Log-probabilities of the token and of the likeliest ones; zeros where no row wants them. Pure."""
    some = min(MOST_LOGPROBS, logits.shape[-1])

    def rank() -> tuple[Array, Array, Array]:
        every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        values, best = jax.lax.top_k(every, some)
        return jnp.take_along_axis(every, token[:, None], axis=-1)[:, 0], best, values

    def nothing() -> tuple[Array, Array, Array]:
        rows = logits.shape[0]
        return (
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, some), jnp.int32),
            jnp.zeros((rows, some), jnp.float32),
        )

    return jax.lax.cond(jnp.any(ranked), rank, nothing)


def first_token(
    logits: Float[Array, "B V"], how: Sampling, ranked: Bool[Array, " B"], position: Int[Array, " B"]
) -> SampledTokens:
    """The token that follows a prompt; arrays are [B, 1, ...]. Pure."""
    return jax.tree.map(lambda x: x[:, None], draw(logits, how, ranked, position))


def piece(x: Float[Array, "1 T D"], begin: Any, width: int) -> Float[Array, "W D"]:
    """Some of a prompt's outputs. Pure."""
    return jax.lax.dynamic_slice_in_dim(jnp.pad(x[0], ((0, width), (0, 0))), begin, width)


def prompt_log_probabilities(
    network: Network, params: Params, x: Float[Array, "T D"], following: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Int[Array, "T X"], Float[Array, "T X"]]:
    """Of the token that follows each output, and of the likeliest ones there. Pure."""
    return log_probabilities(network.logits(params, x), following, jnp.ones(len(following), bool))
