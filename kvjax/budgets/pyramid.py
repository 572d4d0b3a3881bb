"""Pyramid: more slots for lower layers, linearly, the mean over layers preserved.

Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling,
https://arxiv.org/abs/2406.02069
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
class Pyramid(Budget):
    """Layer l of L keeps mean * (hi - (hi - lo) l / (L - 1)) with lo = 1 / slope and hi = 2 - lo.

    Targets are rounded to the nearest slot (halves up). When the lowest layer would keep more than the
    row has seen, the line is flattened around its mean until it does not.

    Attributes:
      amount: the mean over layers; slots per stream, share kept, or bytes of a row.
      slope: mean over the last layer's share; 1 is uniform, the paper's beta 20 is steep.
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
    dials = ("amount", "slope")
    sizes = ("amount",)
    amount: amounts.Amount = 0.25
    slope: float = 2.0
    when: When = "after_prompt"

    @functools.cached_property
    def limit(self) -> amounts.Limit:
        """The amount, its unit read."""
        return amounts.limit(self.amount)

    def leaves(self) -> dict[str, Any]:
        """The limit, and the spread."""
        return {"limit": self.limit, "spread": self.spread}

    @functools.cached_property
    def spread(self) -> float:
        """1 - 1 / slope: how far the first layer lies above the mean, in shares of it."""
        return 1 - 1 / self.slope

    @property
    def least(self) -> int | None:
        """The last layer's target, if the amount is in tokens."""
        mean = amounts.least(self.amount)
        return None if mean is None else int(mean / self.slope + 0.5)

    @property
    def most(self) -> int | None:
        """The first layer's target, if the amount is in tokens."""
        mean = amounts.least(self.amount)
        return None if mean is None else int(mean * (2 - 1 / self.slope) + 0.5)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """The same for all heads of a layer."""
        del scores
        mean = self.limit.slots(frame, length)
        spread = jnp.minimum(mean * self.spread, jnp.maximum(length - mean, 0))
        down = 1 - 2 * frame.layer / max(frame.layers - 1, 1)  # +1 at layer 0 … -1 at the last
        down = jnp.where(frame.layers > 1, down, 0.0)
        return jnp.floor(mean + spread * down + 0.5).astype(jnp.int32)[:, None]


PRESETS = {"pyramidkv": "snapkv + pyramid(0.25)"}
