"""AdaKV: the KV heads of a layer share its slots, and the scores decide how many each head gets.

Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference, https://arxiv.org/abs/2407.11550
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Frame, Number, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Ada(amounts.Sized):
    """Each KV head gets at least ``floor`` of the mean; the layer's other slots go to its best scores.

    Attributes:
      amount: the mean over the KV heads of a layer; slots per head, share kept, or bytes of a row.
      floor: share of the mean that every head keeps whatever its scores (the paper's alpha).
      when, prompt: as in ``uniform``; whenever it acts, all that the heads hold is compared.
    """

    name = "ada"
    arguments = {
        "amount": amounts.Size(),
        "floor": Number(0, 1),
        "when": amounts.Time(),
        "prompt": amounts.OfPrompt(),
    }
    traced = ("amount", "floor")
    from_scores = True
    amount: amounts.Amount = 0.25
    floor: float = 0.2
    when: When = "after_prompt"
    prompt: str = "cut"

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit, "floor": self.floor}

    @property
    def least(self) -> int | None:
        """The mean, if it is in tokens: protected tokens count towards every head first."""
        return self.tokens

    def smallest(self, frame: Frame, length: int) -> int:
        return length if self.spares_prompt else int(self.limit.slots_on_host(frame, length) + 0.5)

    def layer_mean(self, frame: Frame, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """What is spared, and the amount, rounded to the nearest slot (halves up)."""
        kept = self.spared(frame, length)
        return kept + jnp.floor(self.limit.slots(frame, length - kept) + 0.5).astype(jnp.int32)

    def secured(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"]
    ) -> Float[Array, "B K T"]:
        """A head's guaranteed tokens come first in the layer's order, whatever the scores of the others."""
        kept = self.spared(frame, length)
        mean = self.layer_mean(frame, length) - kept
        guaranteed = kept + jnp.floor(mean * self.floor).astype(jnp.int32)
        safe = (_rank(scores) < guaranteed[:, None, None]) & (scores > -jnp.inf)
        return jnp.where(safe, jnp.inf, scores)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """How many of the layer's best scores each head has; ties go to the lowest head and position."""
        assert scores is not None
        scores = frame.heads.gather(self.secured(frame, length, scores))
        heads, tokens = scores.shape[1:]
        mean = self.layer_mean(frame, length)
        order = _rank(scores.reshape(scores.shape[0], heads * tokens)).reshape(scores.shape)
        kept = (order < (mean * heads)[:, None, None]) & (scores > -jnp.inf)
        return frame.heads.local(kept.sum(axis=-1))


def _rank(scores: Float[Array, "... T"]) -> Int[Array, "... T"]:
    """Rank of each score, 0 for the best; ties go to the lowest index."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)


PRESETS = {"adakv": "snapkv + ada(0.25)"}
