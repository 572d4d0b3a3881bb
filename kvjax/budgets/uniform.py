"""The same number of slots for every layer and head."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Budget, Frame, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(Budget):
    """Every stream may keep ``amount``; ratios are rounded to the nearest slot (halves up), bytes down.

    Attributes:
      amount: slots per stream (int), share kept (float in (0, 1]) or bytes of a row ("8MiB").
      when: ``after_prompt`` (once), ``every_step``, or ``every(k)``.

    Raises:
      PolicyError: an amount or a time that is none.
    """

    name = "uniform"
    arguments = {
        "amount": amounts.Size(),
        "when": amounts.Time(),
    }
    traced = ("amount",)
    sizes = ("amount",)
    amount: amounts.Amount = 0.25
    when: When = "after_prompt"

    @functools.cached_property
    def limit(self) -> amounts.Limit:
        """The amount, its unit read."""
        return amounts.limit(self.amount)

    def leaves(self) -> dict[str, Any]:
        """The limit."""
        return {"limit": self.limit}

    @property
    def least(self) -> int | None:
        """The amount, if it is in tokens."""
        return amounts.least(self.amount)

    def smallest(self, frame: Frame, length: int) -> int:
        """The target."""
        rounding = 0.0 if self.limit.unit == "bytes" else 0.5
        return int(amounts.slots(self.amount, frame, length) + rounding)

    @property
    def most(self) -> int | None:
        """The amount, if it is in tokens."""
        return amounts.least(self.amount)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B K"]:
        """The same for all heads."""
        rounding = 0.0 if self.limit.unit == "bytes" else 0.5
        return jnp.floor(self.limit.slots(frame, length) + rounding).astype(jnp.int32)[:, None]
