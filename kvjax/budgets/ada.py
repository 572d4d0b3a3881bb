"""AdaKV: the KV heads of a layer share its slots, and the scores decide how many each head gets.

Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference, https://arxiv.org/abs/2407.11550
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Frame, Number, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Ada(amounts.Shared):
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

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """How many of the layer's best scores each head has; ties go to the lowest head and position."""
        assert scores is not None
        scores = frame.heads.gather(self.secured(frame, length, scores))
        heads, tokens = scores.shape[1:]
        mean = self.layer_mean(frame, length)
        order = amounts.rank(scores.reshape(scores.shape[0], heads * tokens)).reshape(scores.shape)
        kept = (order < (mean * heads)[:, None, None]) & (scores > -jnp.inf)
        return frame.heads.local(kept.sum(axis=-1))


PRESETS = {"adakv": "snapkv + ada(0.25)"}
