"""Q-Filters: keeps the keys that point where the head's queries point, by one calibrated direction a head.

Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression,
https://arxiv.org/abs/2503.02812
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class QFilter(Eviction):
    """Score = product of the key and the head's filter, fixed on arrival. Protects nothing.

    The filter is the first right singular vector of many queries after RoPE, turned so that most of them have
    a positive product with it; mean over a group's query heads. (kvpress's files hold the opposite sign.)

    Learned weights: ``filter`` [K, H] per layer.
    """

    name = "qfilter"
    needs = frozenset({"k"})
    keeps = ("score",)
    learns = "qfilter"
    trained_by = "python -m train.queries --config FILE --part qfilter --export FILE"

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        for index, layer in enumerate(weights):
            self.check_shapes(index, layer, {"filter": (network.num_kv_heads, network.head_dim)}, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        shape = (network.num_kv_heads, network.head_dim)
        keys = jax.random.split(key, network.num_layers)
        return [{"filter": jax.random.normal(layer_key, shape)} for layer_key in keys]

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        if params is None:
            raise PolicyError(f"{self!r} has no filters. Pass weights=kvjax.weights_for(policy, model).")
        k, exact = observed.k.astype(jnp.float32), jax.lax.Precision.HIGHEST
        return {"score": jnp.einsum("bkth,kh->bkt", k, params["filter"], precision=exact)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.meta["score"]


PRESETS = {"qfilter": "qfilter + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=QFilter(), budget=Uniform(24)),
    Policy(eviction=QFilter(), budget=Uniform(28, "every_step"), sinks=2, recent=6),
    Policy(eviction=QFilter(), budget=Ada(20), sinks=2),
)
