"""AdaKV: the heads of a layer share its slots, and the scores decide how many each gets.

Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference, https://arxiv.org/abs/2407.11550
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Budget, Frame, Number, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Ada(Budget):
    """Each head is sure of ``floor`` of the mean; the rest of the layer goes to the best scores of all heads.

    Attributes:
      amount: the mean over the heads of a layer; slots per stream, share kept, or bytes of a row.
      floor: share of the mean that every head keeps whatever its scores (the paper's alpha).
      when: only ``after_prompt``, since the scores of the whole prompt are compared.

    Raises:
      PolicyError: floor outside [0, 1], or an amount or a time that is none.
    """

    name = "ada"
    arguments = {
        "amount": amounts.Size(),
        "floor": Number(0, 1),
        "when": amounts.Time(),
    }
    traced = ("amount", "floor")
    sizes = ("amount",)
    from_scores = True
    amount: amounts.Amount = 0.25
    floor: float = 0.2
    when: When = "after_prompt"

    @functools.cached_property
    def limit(self) -> amounts.Limit:
        """The amount, its unit read."""
        return amounts.limit(self.amount)

    def leaves(self) -> dict[str, Any]:
        """The limit, and the floor."""
        return {"limit": self.limit, "floor": self.floor}

    @property
    def least(self) -> int | None:
        """The mean, if it is in tokens: protected tokens count towards every head first."""
        return amounts.least(self.amount)

    def smallest(self, frame: Frame, length: int) -> int:
        """The mean."""
        return int(amounts.slots(self.amount, frame, length) + 0.5)

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """The amount, rounded to the nearest slot (halves up)."""
        return jnp.floor(self.limit.slots(frame, length) + 0.5).astype(jnp.int32)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """How many of the layer's best scores fall to each head; ties go to the lowest head and position."""
        assert scores is not None  # noqa: S101  (the caller's contract: from_scores)
        scores = frame.heads.gather(scores)
        heads, tokens = scores.shape[1:]
        mean = self.layer_mean(frame, length)
        sure = jnp.floor(mean * self.floor).astype(jnp.int32)
        rank = _rank(scores)
        # A head's sure tokens go first in the layer's order, whatever the others score.
        secured = jnp.where((rank < sure[:, None, None]) & (scores > -jnp.inf), jnp.inf, scores)
        order = _rank(secured.reshape(scores.shape[0], heads * tokens)).reshape(scores.shape)
        kept = (order < (mean * heads)[:, None, None]) & (scores > -jnp.inf)
        return frame.heads.local(kept.sum(axis=-1))


def _rank(scores: Float[Array, "... T"]) -> Int[Array, "... T"]:
    """0 for the best; ties to the lowest index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)


PRESETS = {"adakv": "snapkv + ada(0.25)"}
