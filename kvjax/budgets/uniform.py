"""Uniform: the same number of slots for every layer and KV head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.algebra import Frame, PolicyError, When
from kvjax.budgets import amount as amounts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(amounts.Sized):
    """Every KV head may keep ``amount``; ratios are rounded to the nearest slot (halves up), bytes down.

    Attributes:
      amount: slots per KV head (int), share kept (float in (0, 1]) or bytes of a row ("8MiB").
      when: ``after_prompt`` (once), ``every_step``, or ``every(k)``.
      prompt: ``cut``, or ``keep``: the prompt stays, and ``amount`` is that of the tokens after it, as where
        methods for long answers are compared (TriAttention, https://arxiv.org/abs/2604.04921).

    Raises:
      PolicyError: a prompt that is kept, and a budget that acts on nothing else.
    """

    name = "uniform"
    arguments = {"amount": amounts.Size(), "when": amounts.Time(), "prompt": amounts.OfPrompt()}
    traced = ("amount",)
    amount: amounts.Amount = 0.25
    when: When = "after_prompt"
    prompt: str = "cut"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spares_prompt and self.when == "after_prompt":
            raise PolicyError(
                f"{self!r} acts after the prompt alone and keeps all of it. Give when=every(64), or leave "
                "prompt out."
            )

    @property
    def spares_prompt(self) -> bool:  # type: ignore[override]
        return self.prompt == "keep"

    def leaves(self) -> dict[str, Any]:
        return {"limit": self.limit}

    @property
    def least(self) -> int | None:
        return None if self.spares_prompt else self.tokens

    @property
    def most(self) -> int | None:
        return None if self.spares_prompt else self.tokens

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
        kept = jnp.zeros_like(length)
        if self.spares_prompt:
            assert frame.prompt is not None
            kept = jnp.minimum(frame.prompt, length)
        slots = jnp.floor(self.limit.slots(frame, length - kept) + self._rounding).astype(jnp.int32)
        return (kept + slots)[:, None]
