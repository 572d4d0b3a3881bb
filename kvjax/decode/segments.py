"""The rows that are being written, and the program that writes up to 64 tokens of each."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache.state import KVState
from kvjax.decode.walk import step
from kvjax.policy import Policy
from kvjax.sampling import Sampling, sample
from kvjax.types import EMPTY, Network, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Rows that are being written.

    Attributes:
      token: the last token of each row, written out but not yet fed.
      done: rows that met a stop token or their limit.
      left: tokens each row may still write.
      stops: ids that end a row, EMPTY-padded.
      how: sampling parameters.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    stops: Int[Array, " Z"]
    how: Sampling


@functools.partial(jax.jit, static_argnames=("network", "policy", "steps"), donate_argnames=("state",))
def segment(
    network: Network, policy: Policy, steps: int, params: Params, weights: Params, state: KVState, run: Run
) -> tuple[KVState, Run, Int[Array, "B steps"]]:
    """Up to ``steps`` tokens for every row that is not done, in one program."""
    out = jnp.full((state.rows, steps), EMPTY, jnp.int32)

    def go(carry: tuple[Array, KVState, Run, Array]) -> Array:
        i, _, run, _ = carry
        return (i < steps) & ~jnp.all(run.done)

    def one(carry: tuple[Array, KVState, Run, Array]) -> tuple[Array, KVState, Run, Array]:
        i, state, run, out = carry
        state, logits = step(network, policy, params, weights, state, run.token, ~run.done)
        run, fresh = _advance(run, logits, state.length)
        return i + 1, state, run, out.at[:, i].set(fresh)

    _, state, run, out = jax.lax.while_loop(go, one, (jnp.asarray(0), state, run, out))
    return state, run, out


def _advance(run: Run, logits: Float[Array, "B V"], length: Int[Array, " B"]) -> tuple[Run, Int[Array, " B"]]:
    """Draw the token that will stand at position ``length``; EMPTY for rows that were done."""
    drawn = sample(logits, run.how, length)
    fresh = jnp.where(run.done, EMPTY, drawn)
    left = run.left - (~run.done).astype(jnp.int32)
    done = run.done | (left <= 0) | jnp.any(drawn[:, None] == run.stops[None, :], axis=-1)
    return dataclasses.replace(run, token=jnp.where(run.done, run.token, drawn), done=done, left=left), fresh


first_token = jax.jit(_advance)
"""Draws the token that follows a prompt, for every row."""
