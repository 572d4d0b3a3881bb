"""Random: the baseline that any method must beat."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Observation, Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class Random(Eviction):
    """Score = a uniform draw that depends on (seed, layer, head, position) alone, never on the batch.

    Attributes:
      seed: of the draws.

    Raises:
      PolicyError: a seed that is no whole number of 32 bits.
    """

    name = "random"
    keeps = ("draw",)
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise PolicyError(f"{self!r}: {self.seed!r} is no seed. Give a whole number from 0 to 2**32 - 1.")

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """One draw per token and head."""
        del params
        key = jax.random.fold_in(jax.random.PRNGKey(self.seed), observed.layer)
        heads = observed.k.shape[1]

        def draw(pos: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, pos), (heads,))

        return {"draw": jnp.moveaxis(jax.vmap(jax.vmap(draw))(observed.pos), 2, 1)}

    needs = frozenset({"k"})  # for the number of heads

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        """The draw."""
        del params
        return slots.meta["draw"]


EXAMPLES = (
    Policy(eviction=Random(), budget=Uniform(0.5), sinks=2),
    Policy(eviction=Random(seed=1), budget=Uniform(40, Every(8)), recent=8),
)
