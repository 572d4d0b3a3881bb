"""The policy's learned weights as the loops take them: checked once, then each part's own at every layer."""

from __future__ import annotations

from kvjax.learned import WeightsError, missing
from kvjax.policy import Policy
from kvjax.types import Params, Weighted


def checked(model: Weighted, policy: Policy, weights: Params | None) -> Params:
    """The learned weights, refused where the policy needs others or none."""
    weights = weights or {}
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
            "nothing. Leave them out, or use the policy they were trained for."
        )
    return weights


def at_layer(policy: Policy, weights: Params, index: int) -> Params:
    """What each part reads of its learned weights at a layer, by place."""
    return {p.place: p.at_layer(weights[p.place], index) for p in policy.parts if p.place in weights}
