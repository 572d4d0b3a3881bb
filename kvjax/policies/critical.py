"""CriticalKV: half of what stays goes by the wrapped scores, the rest by these times the norm of W_o v.

Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
https://arxiv.org/abs/2502.03805
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Number, Observation, Wrapper, places

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Critical(Wrapper):
    """A token is worth what it adds to the layer's output: its attention times ||W_o v||.

    The norm is L1, the mean over a group's query heads. Of a KV head's tokens, ``first`` are the best by the
    wrapped scores. The others are the best by (score + ``floor``) times the norm. A budget that compares the
    heads of a layer (``ada``) compares the wrapped scores, and the tokens that it guarantees to a head stay.
    The norm means most for scores that are shares of attention; of a negative score it makes a lower one.

    Attributes:
      first: share of a head's tokens that the first stage takes, rounded down, at least one token.
      floor: added to the scores of the second stage.
    """

    name = "critical"
    arguments = {"first": Number(0, 1), "floor": Number()}
    traced = ("first", "floor")
    needs = frozenset({"v", "wo_norm"})
    first: float = 0.5
    floor: float = 1e-4

    def rescored(self, observed: Observation, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        scores = self.of.rescored(observed, scores)
        rows, heads, t = scores.shape
        norm = observed.wo_norm().reshape(rows, heads, -1, t).mean(axis=2)
        return jnp.where(jnp.isfinite(scores), (scores + self.floor) * norm, scores)

    def choose(
        self, observed: Observation, scores: Float[Array, "B K T"], target: Int[Array, "B K"]
    ) -> Bool[Array, "B K T"]:
        least = jnp.where(self.first > 0, 1, 0)
        first = jnp.maximum(jnp.floor(target * self.first).astype(jnp.int32), least)
        taken = places(self.of.rescored(observed, scores)) < first[..., None]
        return super().choose(observed, jnp.where(taken & (scores > -jnp.inf), jnp.inf, scores), target)


PRESETS = {
    "criticalkv": "snapkv + critical + uniform(0.25)",
    "critical-adakv": "snapkv + critical + ada(0.25)",
}

EXAMPLES = ("snapkv(8) + critical + uniform(24)", "kvp(2, recent=6) + critical(0.25) + ada(20)")
