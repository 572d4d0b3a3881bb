"""AdaKV: the heads of a layer share its slots, and the scores decide how many each gets.

Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference, https://arxiv.org/abs/2407.11550
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Budget, Frame, PolicyError, When
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
    sizes = ("amount",)
    from_scores = True
    amount: amounts.Amount = 0.25
    floor: float = 0.2
    when: When = "after_prompt"

    def __post_init__(self) -> None:
        amounts.check(repr(self), self.amount, self.when)
        if not 0 <= self.floor <= 1:
            raise PolicyError(f"{self!r}: floor={self.floor} is no share. Give a number in [0, 1].")

    @property
    def least(self) -> int | None:
        """The mean, if it is in tokens: protected tokens count towards every head first."""
        return amounts.least(self.amount)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """How many of the layer's best scores fall to each head; ties go to the lowest head and position."""
        assert scores is not None  # noqa: S101  (the caller's contract: from_scores)
        heads, tokens = scores.shape[1:]
        mean = jnp.floor(amounts.slots(self.amount, frame, length) + 0.5).astype(jnp.int32)
        sure = jnp.floor(mean * self.floor).astype(jnp.int32)
        rank = _rank(scores)
        # A head's sure tokens go first in the layer's order, whatever the others score.
        secured = jnp.where((rank < sure[:, None, None]) & (scores > -jnp.inf), jnp.inf, scores)
        order = _rank(secured.reshape(scores.shape[0], heads * tokens)).reshape(scores.shape)
        kept = (order < (mean * heads)[:, None, None]) & (scores > -jnp.inf)
        return kept.sum(axis=-1)


def _rank(scores: Float[Array, "... T"]) -> Int[Array, "... T"]:
    """0 for the best; ties to the lowest index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
