"""PyramidKV: slots fall linearly from the first layer to the last; their mean is the budget.

Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
https://arxiv.org/abs/2406.02069
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Frame, Number, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Pyramid(amounts.Sized):
    """Layer l of L keeps hi - (hi - lo) l / (L - 1) slots with lo = mean / slope and hi = 2 mean - lo.

    For a row of T tokens with w protected ones, hi is at most T - w, which flattens the line around its mean.
    If that gives lo < w or hi < lo, all layers keep the mean. Targets are rounded to the nearest slot (halves
    to even). These are the budgets of kvpress (``PyramidKVPress``), whose slope is 20.

    Attributes:
      amount: the mean over layers; slots per KV head, share kept, or bytes of a row.
      slope: the mean divided by the last layer's target; 1 is uniform, 20 is the authors' beta.
      when, prompt: as in ``uniform``; of a prompt that is kept no token counts, T and w are the answer's.
    """

    name = "pyramid"
    arguments = {
        "amount": amounts.Size(),
        "slope": Number(1, what="slope"),
        "when": amounts.Time(),
        "prompt": amounts.OfPrompt(),
    }
    traced = ("amount", "slope")
    amount: amounts.Amount = 0.25
    slope: float = 2.0
    when: When = "after_prompt"
    prompt: str = "cut"

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit, "slope": float(self.slope)}

    @property
    def least(self) -> int | None:
        return self.least_beside(0)

    def least_beside(self, protected: int) -> int | None:
        return None if self.tokens is None else self._last(self.tokens, math.inf, protected)

    def smallest(self, frame: Frame, length: int) -> int:
        if self.spares_prompt:
            return length
        return self._last(self.limit.slots_on_host(frame, length), length, frame.protected)

    def _last(self, mean: float, length: float, protected: int) -> int:
        """The last layer's target, which is the smallest."""
        high = min(2 * mean - mean / self.slope, length - protected)
        low = 2 * mean - high
        return round(low if high >= low >= protected else mean)

    @property
    def most(self) -> int | None:
        return None if self.tokens is None else round(2 * self.tokens - self.tokens / self.slope)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B 1"]:
        kept = self.spared(frame, length)
        mean = self.limit.slots(frame, length - kept)
        high = jnp.minimum(2 * mean - mean / self.slope, length - kept - frame.protected)
        low = 2 * mean - high
        falls = (frame.layers > 1) & (high >= low) & (low >= frame.protected)
        high, low = (jnp.where(falls, end, mean) for end in (high, low))
        line = high - (high - low) * frame.layer / max(frame.layers - 1, 1)
        return (kept + jnp.round(line).astype(jnp.int32))[:, None]


PRESETS = {"pyramidkv": "snapkv + pyramid(0.25)"}
