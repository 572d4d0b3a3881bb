"""TOVA: ranks tokens by the last query's attention, averaged over all heads of a layer.

Oren et al., Transformers are Multi-State RNNs, https://arxiv.org/abs/2401.06104
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, repr=False)
class Tova(Eviction):
    """Score = attention of each row's last query, mean over all query heads of the layer.

    All KV heads keep the same tokens. Protects nothing, not even the last token (it gets its own attention
    like any other); for implementations that always keep that one, add ``recent(1)``.
    """

    name = "tova"
    needs = frozenset({"k", "mass"})
    keeps = ("mass",)
    shared_ranking = True

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"mass": jnp.zeros(observed.k.shape[:3], jnp.float32)}

    def query_weights(self, age: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return (age == 0).astype(jnp.float32)

    def accumulate(self, slots: Slots, mass: Float[Array, "B 1 C"], count: Array) -> dict[str, Array]:
        return {"mass": jnp.broadcast_to(mass, slots.meta["mass"].shape)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.meta["mass"]

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B 1 T"]:
        return observed.heads.mean(observed.mass)


PRESETS = {"tova": "tova + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=Tova(), budget=Uniform(24)),
    Policy(eviction=Tova(), budget=Uniform(22, "every_step")),
)
