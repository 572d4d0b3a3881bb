"""K-norm: evicts the keys with the largest norms, since keys with small norms receive most attention.

Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression,
https://arxiv.org/abs/2406.11430
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
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class KNorm(Eviction):
    """Score = minus the L2 norm of the key, in float32 (in bf16 most scores would tie). Protects nothing."""

    name = "knorm"
    needs = frozenset({"k"})
    keeps = ("norm",)

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        """The norm of each key, which RoPE does not change."""
        return {"norm": jnp.linalg.norm(observed.k.astype(jnp.float32), axis=-1)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return -slots.meta["norm"]


PRESETS = {"knorm": "knorm + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=KNorm(), budget=Uniform(32)),
    Policy(eviction=KNorm(), budget=Uniform(40, "every_step"), sinks=4, recent=8),
)
