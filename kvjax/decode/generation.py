"""New tokens after a prompt: streamed segment by segment, or all at once."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from kvjax import metrics
from kvjax.cache.state import KVState
from kvjax.decode.prompts import prefill
from kvjax.decode.requests import RequestError, check_room
from kvjax.decode.rooms import reserve
from kvjax.decode.segments import Run, first_token, segment
from kvjax.decode.sizes import CHUNK, HORIZON, SEGMENT, bucket
from kvjax.decode.weights import checked
from kvjax.learned import weights_for
from kvjax.policy import AdmitAll, Policy
from kvjax.sampling import Sampling, sampling
from kvjax.types import EMPTY, Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass
class Generation:
    """What ``generate`` returns.

    Attributes:
      tokens: new token ids per row, a stop token included.
      state: the KV state after the last fed token.
    """

    tokens: list[list[int]]
    state: KVState


def stream(
    model: Weighted,
    policy: Policy,
    state: KVState,
    logits: Float[Array, "B V"],
    *,
    max_new_tokens: int | Sequence[int],
    how: Sampling | None = None,
    stops: Sequence[int] = (),
    weights: Params | None = None,
    every: int = SEGMENT,
) -> Iterator[tuple[np.ndarray, KVState]]:
    """Continue a prefilled state, yielding every few tokens.

    Args:
      model, policy, weights: as in ``prefill``.
      state: donated; use the one that comes with each piece.
      logits: of each row's next token.
      max_new_tokens: for all rows, or one number a row.
      how: sampling parameters; greedy by default.
      stops: token ids that end a row.
      every: most tokens a piece; the host looks at the device once a piece.

    Yields:
      (int32 [B, n] new tokens with EMPTY where a row had ended, the state after them).
    """
    weights, rows = checked(model, policy, weights), state.rows
    limit = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (rows,))
    if limit.min() < 1:
        raise RequestError(f"stream(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    if limit.max() > 1:  # the last new token of a row is never fed
        check_room("stream", state, limit - 1)
    run = Run(
        token=jax.device_put(np.zeros(rows, np.int32)),
        done=jax.device_put(np.zeros(rows, bool)),
        left=jax.device_put(limit),
        stops=jax.device_put(np.asarray([*stops] or [EMPTY], np.int32)),
        how=sampling(rows) if how is None else how,
    )
    run, fresh = first_token(run, logits, state.length)
    # Where everything is kept the context bounds the pool: one size for all prompts of a size class.
    keeps_all = policy.admission == AdmitAll() and policy.on_arrival
    written = 1
    yield np.asarray(fresh)[:, None], state
    while not bool(np.asarray(run.done).all()):
        left = int(limit.max()) - written
        ahead = state.context if keeps_all else min(HORIZON, left)
        state = reserve(policy, state, min(every, left), 1, ahead=ahead)
        state, run, out = segment(model.network, policy, every, model.params, weights, state, run)
        found = np.asarray(out)
        written += every
        yield found[:, (found != EMPTY).any(axis=0)], state


def generate(
    model: Weighted,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int = 0,
    stops: Sequence[int] = (),
    chunk_size: int = CHUNK,
    page: int | None = None,
    weights: Params | None = None,
) -> Generation:
    """Prompts in, new tokens out.

    Args:
      model: a network and its weights.
      policy: what the KV cache keeps.
      prompts: token ids per row.
      max_new_tokens: most new tokens a row.
      temperature, top_k, top_p, seed: see ``kvjax.sampling``.
      stops: token ids that end a row.
      chunk_size, page: as in ``prefill``.
      weights: the policy's learned weights; by default those that the model ships.

    Raises:
      RequestError: as in ``prefill``, and when prompt and new tokens exceed the model's context.
      WeightsError: a policy that learns, and no weights that fit.
    """
    weights = weights_for(policy, model) if weights is None else weights
    if max_new_tokens < 1:
        raise RequestError(f"generate(max_new_tokens={max_new_tokens}) writes nothing. Give 1 or more.")
    how = sampling(len(prompts), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + max_new_tokens > model.network.max_positions:
        raise RequestError(
            f"generate(max_new_tokens={max_new_tokens}) after {longest} prompt tokens exceeds the model's "
            f"{model.network.max_positions} positions. Ask for fewer tokens, or shorten the prompt."
        )
    _tell_of_windows(model.network, policy)
    context = bucket(longest + max_new_tokens)
    state, logits = prefill(
        model, policy, prompts, context=context, chunk_size=chunk_size, page=page, weights=weights
    )
    out: list[list[int]] = [[] for _ in prompts]
    pieces = stream(
        model, policy, state, logits, max_new_tokens=max_new_tokens, how=how, stops=stops, weights=weights
    )
    for piece, after in pieces:
        state = after
        for row, tokens in enumerate(piece):
            out[row] += [int(token) for token in tokens if token != EMPTY]
    return Generation(tokens=out, state=metrics.with_peak(state))


def _tell_of_windows(network: Network, policy: Policy) -> None:
    sliding = [f"{i}: {window}" for i, window in enumerate(network.windows) if window is not None]
    if sliding and policy != Policy():
        warnings.warn(
            f"the policy has no say in layers whose own sliding window rules ({len(sliding)} of "
            f"{network.num_layers}; layer: tokens = {', '.join(sliding)}).",
            stacklevel=3,
        )
