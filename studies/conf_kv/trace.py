"""Step by step: how sure the model was, and how much each layer held (the sawtooth of CONF-KV)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.types import Params, Weighted
from kvjax.weights import weights_for

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened while rows were written; index i is after i steps, 0 after the prompt.

    Attributes:
      tokens: drawn from the logits after i steps, EMPTY where a row had ended; step i + 1 feeds them.
      live: slots of each layer that hold a token, mean over KV heads.
      confidence: what the budget read off the logits after i steps, which decides step i + 1; None where no
        budget looks at logits.
    """

    tokens: Int[np.ndarray, "B I"]
    live: Float[np.ndarray, "B I L"]
    confidence: Float[np.ndarray, "B I"] | None


def trace(
    model: Weighted,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stops: Sequence[int] = (),
    weights: Params | None = None,
) -> Trace:
    """Greedy answers, looked at after every step; the device is asked each time, so nothing here is fast.

    Args:
      model, policy, prompts, max_new_tokens, weights: as in ``decode.generate``.
      stops: token ids that end a row.

    Raises:
      RequestError: as in ``decode.prefill``.
    """
    weights = weights_for(policy, model) if weights is None else weights
    longest = max((len(prompt) for prompt in prompts), default=0)
    context = decode.bucket(longest + max_new_tokens, model.network.max_positions)
    state, logits = decode.prefill(model, policy, prompts, context=context, weights=weights)
    tokens, live, sure = [], [], []
    pieces = decode.stream(
        model, policy, state, logits, max_new_tokens=max_new_tokens, stops=stops, weights=weights, every=1
    )
    for piece, after in pieces:
        tokens.append(piece[:, 0])
        live.append(np.asarray(metrics.live_slots(after)).mean(axis=-1).T)
        if after.confidence is not None:
            sure.append(np.asarray(after.confidence))
    return Trace(
        tokens=np.stack(tokens, axis=1),
        live=np.stack(live, axis=1),
        confidence=np.stack(sure, axis=1) if sure else None,
    )
