"""Uniform: the same number of slots for every layer and KV head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Frame, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(amounts.Sized):
    """Every KV head may keep ``amount``; ratios are rounded to the nearest slot (halves up), bytes down.

    Attributes:
      amount: slots per KV head (int), share kept (float in (0, 1]) or bytes of a row ("8MiB").
      when: ``after_prompt`` (once), ``every_step``, or ``every(k)``.
      prompt: ``cut``, or ``keep``: the prompt stays, and ``amount`` is that of the tokens after it.
    """

    name = "uniform"
    arguments = {"amount": amounts.Size(), "when": amounts.Time(), "prompt": amounts.OfPrompt()}
    traced = ("amount",)
    amount: amounts.Amount = 0.25
    when: When = "after_prompt"
    prompt: str = "cut"

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit}

    @property
    def least(self) -> int | None:
        return self.tokens

    @property
    def most(self) -> int | None:
        return self.tokens

    @property
    def _rounding(self) -> float:
        return 0.0 if self.limit.unit == "bytes" else 0.5

    def smallest(self, frame: Frame, length: int) -> int:
        if self.spares_prompt:
            return length
        return int(self.limit.slots_on_host(frame, length) + self._rounding)

    def targets(
        self, frame: Frame, length: Int[Array, " B"], scores: Float[Array, "B K T"] | None
    ) -> Int[Array, "B 1"]:
        kept = self.spared(frame, length)
        slots = jnp.floor(self.limit.slots(frame, length - kept) + self._rounding).astype(jnp.int32)
        return (kept + slots)[:, None]
