"""What a caller is told: how much is done, or why a request cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.types import Network, Params, Weighted
from kvjax.weights import WeightsError, missing

Progress = Callable[[int, int], None]
"""Called with (done, all) units of prefill work: tokens, or layers."""


class RequestError(ValueError):
    """A prompt or a request that cannot be served."""


def check_prompts(network: Network, lengths: list[int], context: int) -> None:
    """Refuse prompts that are empty, or longer than the model or the context allows."""
    if not lengths:
        raise RequestError("prefill(prompts=[]) has no row to read. Give at least one prompt.")
    for row, n in enumerate(lengths):
        if n < 1:
            raise RequestError(f"prefill: row {row} is empty. Give every row at least one token.")
        if n > network.max_positions:
            raise RequestError(
                f"prefill: row {row} has {n} tokens, the model was trained for {network.max_positions}. "
                "Shorten the prompt, or use a model with a longer context."
            )
        if n > context:
            raise RequestError(f"prefill(context={context}): row {row} has {n} tokens. Raise context.")


def check_space(call: str, state: KVState, more: np.ndarray) -> None:
    """Refuse tokens for which the state has no space (a ring would silently forget, a list overflow)."""
    if len(more) != state.rows or more.max(initial=0) < 1:
        raise RequestError(
            f"{call}: {len(more)} rows of up to {more.max(initial=0)} tokens for a state of {state.rows} "
            "rows. Give every row of the state a list, at least one of them not empty."
        )
    after = np.asarray(state.length) + more
    if after.max() > state.context:
        raise RequestError(
            f"{call}: row {int(after.argmax())} would reach {int(after.max())} tokens, the state was made "
            f"for context={state.context}. Pass a larger context to prefill."
        )


def check_weights(model: Weighted, policy: Policy, weights: Params | None) -> Params:
    """The learned weights as the loops take them; refused where the policy needs others or none.

    Raises:
      WeightsError: weights that are missing, needless, or of another model.
    """
    weights = {} if weights is None else weights
    if not isinstance(weights, Mapping) or any(isinstance(x, str | Path) for x in weights.values()):
        raise WeightsError(
            f"weights={weights!r} names weights that are not read yet. Pass "
            f"weights=kvjax.weights_for(policy, model, {weights!r})."
        )
    for part in policy.learned:
        if part.place not in weights:
            raise missing(part, model)
        if len(weights[part.place]) != model.network.num_layers:
            raise WeightsError(
                f"weights[{part.place!r}] has {len(weights[part.place])} layers, the model has "
                f"{model.network.num_layers}. Give one entry a layer."
            )
        part.check_weights(weights[part.place], model.network)
    needless = set(weights) - {part.place for part in policy.learned}
    if needless:
        raise WeightsError(
            f"weights for {', '.join(sorted(needless))} are given, where the policy {policy!r} learns "
            "nothing. Leave them out, or use the policy they were trained for; "
            "kvjax.weights_for(policy, model) gives what it needs."
        )
    return weights
