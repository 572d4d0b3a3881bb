"""Pyramid: more slots for lower layers, linearly, the mean over layers preserved.

Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
https://arxiv.org/abs/2406.02069
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Budget, Frame, Number, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Pyramid(Budget):
    """Layer l of L keeps hi - (hi - lo) l / (L - 1) slots with lo = mean / slope and hi = 2 mean - lo.

    Of a row of T tokens with w protected ones hi is at most T - w, which flattens the line around its mean;
    where that leaves lo < w or hi < lo, all layers keep the mean. Rounded to the nearest slot (a half to the
    even one). These are the budgets of kvpress (``PyramidKVPress``), whose slope is 20.

    Attributes:
      amount: the mean over layers; slots per stream, share kept, or bytes of a row.
      slope: mean over the last layer's share; 1 is uniform, the authors' beta 20 is steep.
      when: as in ``uniform``.

    Raises:
      PolicyError: slope < 1, or an amount or a time that is none.
    """

    name = "pyramid"
    arguments = {
        "amount": amounts.Size(),
        "slope": Number(1, what="slope"),
        "when": amounts.Time(),
    }
    traced = ("amount", "slope")
    sizes = ("amount",)
    amount: amounts.Amount = 0.25
    slope: float = 2.0
    when: When = "after_prompt"

    @functools.cached_property
    def limit(self) -> amounts.Limit:
        """The amount, its unit read."""
        return amounts.limit(self.amount)

    def leaves(self) -> dict[str, Any]:
        """The limit, and the slope."""
        return {"limit": self.limit, "slope": float(self.slope)}

    @property
    def least(self) -> int | None:
        """The last layer's target, if the amount is in tokens and nothing is protected."""
        return self.least_beside(0)

    def least_beside(self, protected: int) -> int | None:
        """The last layer's target, if the amount is in tokens; or the mean, where that protects more."""
        mean = amounts.least(self.amount)
        return None if mean is None else self._last(mean, math.inf, protected)

    def smallest(self, frame: Frame, length: int) -> int:
        """The last layer's target."""
        return self._last(amounts.slots(self.amount, frame, length), length, frame.protected)

    def _last(self, mean: float, length: float, protected: int) -> int:
        high = min(2 * mean - mean / self.slope, length - protected)
        low = 2 * mean - high
        return round(low if high >= low >= protected else mean)

    @property
    def most(self) -> int | None:
        """The first layer's target, if the amount is in tokens."""
        mean = amounts.least(self.amount)
        return None if mean is None else round(2 * mean - mean / self.slope)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """The same for all heads of a layer."""
        mean = self.limit.slots(frame, length)
        high = jnp.minimum(2 * mean - mean / self.slope, length - frame.protected)
        low = 2 * mean - high
        falls = (frame.layers > 1) & (high >= low) & (low >= frame.protected)
        high, low = (jnp.where(falls, end, mean) for end in (high, low))
        line = high - (high - low) * frame.layer / max(frame.layers - 1, 1)
        return jnp.round(line).astype(jnp.int32)[:, None]


PRESETS = {"pyramidkv": "snapkv + pyramid(0.25)"}
