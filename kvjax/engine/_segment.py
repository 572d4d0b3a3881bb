"""The program of a lane: up to a few steps of every row, each row drawing as its request asked."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.engine._dials import by_rows
from kvjax.engine.request import MOST_LOGPROBS
from kvjax.sampling import Sampling, sample
from kvjax.types import EMPTY, Network, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Rows that are being written.

    Attributes:
      token: the last token of each row, written out but not yet fed; int [B].
      active: rows that are to be written on, bool [B].
      left: tokens each row may still write, int [B].
      stops: ids that end a row, EMPTY-padded, int [B, Z].
      ranked: does a row want log-probabilities? bool [B].
      how: sampling parameters.
      steps: how many at most, up to those of the program; a number, so that fewer compile nothing.
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
class Drawn:
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
class Lengths:
    """What the host knows of a state after a segment.

    Attributes:
      seen: tokens of each row, int [B].
      lists: live slots of each list, int [B, K, R], of every pool of every layer in turn.
      free: free pages of these pools; of each device where there are several.
      overflow: did one of them lose a token?
    """

    seen: Any
    lists: tuple[Any, ...]
    free: tuple[Any, ...]
    overflow: Any


def lengths(state: KVState) -> Lengths:
    """Of a state; pure."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    return Lengths(
        seen=state.length,
        lists=tuple(pages.length for pages in pools),
        free=tuple(pages.n_free for pages in pools),
        overflow=jnp.any(jnp.stack([jnp.asarray(False), *(jnp.any(pages.overflow) for pages in pools)])),
    )


def look(state: KVState) -> Lengths:
    """``lengths`` of a state, on the host; no program is run."""
    pools = [pages for layer in state.layers for pages in layer.pools]
    found = jax.device_get((state.length, [(p.length, p.n_free, p.overflow) for p in pools]))
    seen, rest = found
    return Lengths(
        seen=seen,
        lists=tuple(x[0] for x in rest),
        free=tuple(x[1] for x in rest),
        overflow=np.asarray(any(x[2].any() for x in rest)),
    )


@functools.partial(jax.jit, static_argnames=("network", "steps"), donate_argnames="state")
def segment(
    network: Network,
    policies: Policy,
    steps: int,
    params: Params,
    weights: Params,
    state: KVState,
    run: Run,
) -> tuple[KVState, Drawn, Lengths]:
    """Up to ``steps`` tokens of every active row.

    Args:
      network, params, weights: as in ``kvjax.decode.step``.
      policies: those of all rows, stacked (``_dials.stack``).
      steps: static.
      state: donated; with free pages for whatever comes.
      run: what rows are to be written, and how.
    """
    policy, rows = by_rows(policies), state.rows
    some = min(MOST_LOGPROBS, params["embed"].shape[0])
    drawn = Drawn(
        token=jnp.full((rows, steps), EMPTY, jnp.int32),
        logprob=jnp.zeros((rows, steps), jnp.float32),
        best=jnp.zeros((rows, steps, some), jnp.int32),
        logprobs=jnp.zeros((rows, steps, some), jnp.float32),
    )

    def step(state: KVState, run: Run) -> tuple[KVState, Array]:
        return decode.step(network, policy, params, weights, state, run.token, run.active)

    def advance(run: Run, logits: Array, state: KVState) -> tuple[Run, Drawn]:
        fresh = draw(logits, run.how, run.ranked, state.length)
        token = jnp.where(run.active, fresh.token, run.token)
        written = dataclasses.replace(fresh, token=jnp.where(run.active, fresh.token, EMPTY))
        left = run.left - run.active
        active = run.active & (left > 0) & ~jnp.any(token[:, None] == run.stops, axis=-1)
        return dataclasses.replace(run, token=token, left=left, active=active), written

    state, _, drawn = decode.decode_loop(step, advance, state, run, drawn, run.steps)
    return state, drawn, lengths(state)


def draw(
    logits: Float[Array, "B V"], how: Sampling, ranked: Bool[Array, " B"], position: Int[Array, " B"]
) -> Drawn:
    """One token a row, which will stand at ``position``; log-probabilities where a row wants them. Pure."""
    token = sample(logits, how, position)
    logprob, best, logprobs = log_probabilities(logits, token, ranked)
    return Drawn(token=token, logprob=logprob, best=best, logprobs=logprobs)


def log_probabilities(
    logits: Float[Array, "B V"], token: Int[Array, " B"], ranked: Bool[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B X"], Float[Array, "B X"]]:
    """Of the token, and of the likeliest ones; zeros where no row asks. Pure."""
    some = min(MOST_LOGPROBS, logits.shape[-1])

    def rank() -> tuple[Array, Array, Array]:
        every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        found, best = jax.lax.top_k(every, some)
        return jnp.take_along_axis(every, token[:, None], axis=-1)[:, 0], best, found

    def nothing() -> tuple[Array, Array, Array]:
        rows = logits.shape[0]
        return (
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, some), jnp.int32),
            jnp.zeros((rows, some), jnp.float32),
        )

    return jax.lax.cond(jnp.any(ranked), rank, nothing)


@jax.jit
def first(
    logits: Float[Array, "B V"], how: Sampling, ranked: Bool[Array, " B"], position: Int[Array, " B"]
) -> Drawn:
    """The token that follows a prompt; arrays are [B, 1, ...]."""
    return jax.tree.map(lambda x: x[:, None], draw(logits, how, ranked, position))


@functools.partial(jax.jit, static_argnames="network")
def prompt_log_probabilities(
    network: Network, params: Params, x: Float[Array, "T D"], following: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Int[Array, "T X"], Float[Array, "T X"]]:
    """Of the token that follows each output, and of the likeliest ones there."""
    return log_probabilities(network.logits(params, x), following, jnp.ones(len(following), bool))
