"""Random: evicts random tokens; the baseline that every method must beat."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.algebra import Every, Eviction, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Random(Eviction):
    """Score = a uniform draw that depends only on seed, layer, head and position, never on the batch.

    Attributes:
      seed: of the draws.
    """

    name = "random"
    arguments = {"seed": Whole(0, "seed", 2**32 - 1)}
    traced = ("seed",)
    needs = frozenset({"k"})  # for the number of heads
    keeps = ("draw",)
    seed: int = 0

    def leaves(self) -> dict[str, Any]:
        return {"seed": np.uint32(self.seed)}

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"draw": observed.draws(self.seed)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.meta["draw"]


PRESETS = {"random": "random + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=Random(), budget=Uniform(0.5), sinks=2),
    Policy(eviction=Random(seed=1), budget=Uniform(40, Every(8)), recent=8),
)
