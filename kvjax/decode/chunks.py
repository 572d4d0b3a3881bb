"""Tokens fed to a state chunk by chunk, room made before each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import metrics
from kvjax.cache import state as states
from kvjax.cache.state import KVState
from kvjax.decode.requests import Progress, check_room
from kvjax.decode.rooms import reserve
from kvjax.decode.sizes import padded
from kvjax.decode.walk import chunk_program, logits_of, with_confidence
from kvjax.decode.weights import checked
from kvjax.policy import AdmitAll, Policy
from kvjax.types import Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def extend(
    model: Weighted,
    policy: Policy,
    state: KVState,
    prompts: Sequence[Sequence[int]],
    *,
    weights: Params | None = None,
    progress: Progress | None = None,
) -> tuple[KVState, Float[Array, "B V"]]:
    """Feed more tokens to a state, chunk by chunk (``state.chunk``); rows may differ in length.

    Args:
      model, policy, weights, progress: as in ``prefill``.
      state: donated.
      prompts: token ids per row; an empty row is left as it is and its logits are meaningless.

    Raises:
      RequestError: nothing to feed, another number of rows, or more tokens than ``state.context`` allows.
    """
    weights = checked(model, policy, weights)
    lengths, chunk_size = np.asarray([len(prompt) for prompt in prompts]), state.chunk
    check_room("extend", state, lengths)
    longest = int(lengths.max())
    tokens = padded(prompts, -(-longest // chunk_size) * chunk_size)
    last: Array | None = None
    # Where everything is admitted, and all of it stays or a fixed number, the need is known: all of it at
    # once, one size, one program. (A share of the context is more than a shorter prompt can fill.)
    ahead = longest if policy.admission == AdmitAll() and _known(policy, state) else chunk_size
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


def _known(policy: Policy, state: KVState) -> bool:
    """Does everything stay, or a number of slots that no context changes?"""
    most, wider = (policy.bounds(times * state.context, state.chunk) for times in (1, 2))
    return policy.on_arrival or (None not in most and most == wider)
