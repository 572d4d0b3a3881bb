"""TRIM-KV: a learned gate says on arrival how fast a token is forgotten; the most forgotten one is evicted.

Bui et al., Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs,
https://arxiv.org/abs/2512.03324

A layer's gate reads the input x of attention and gives each KV head the token's retention,

  beta = sigmoid(w2 SiLU(x w1 + b1) + b2),

of which beta^(t - i) is left when the query at t looks back at the token at i. ``train.retention`` trains
gates under attention whose scores are multiplied by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float

HIDDEN = 512
"""The paper's width of a gate."""


def log_retention(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B K T"]:
    """log beta in float32; beta itself would round to 1 for tokens that are kept long."""
    exact = jax.lax.Precision.HIGHEST
    x = jnp.einsum("btd,df->btf", hidden.astype(jnp.float32), params["w1"], precision=exact) + params["b1"]
    z = jnp.einsum("btf,kf->bkt", jax.nn.silu(x), params["w2"], precision=exact)
    return jax.nn.log_sigmoid(z + params["b2"][:, None])


def initial(
    key: Array, model_dim: int, kv_heads: int, num_layers: int, hidden: int = HIDDEN, bias: float = 0.0
) -> list[Params]:
    """Untrained gates: a list with the params of one layer each, float32.

    Args:
      key: a PRNG key.
      model_dim, kv_heads, num_layers: D, K and L of the model.
      hidden: F, width of a gate.
      bias: the first b2; a large one forgets nothing.
    """

    def one_layer(key: Array) -> Params:
        first, second = jax.random.split(key)
        return {
            "w1": jax.random.normal(first, (model_dim, hidden)) * model_dim**-0.5,
            "b1": jnp.zeros(hidden),
            "w2": jax.random.normal(second, (kv_heads, hidden)) * hidden**-0.5,
            "b2": jnp.full(kv_heads, bias),
        }

    return [one_layer(layer_key) for layer_key in jax.random.split(key, num_layers)]


@dataclasses.dataclass(frozen=True, repr=False)
class TrimKV(Eviction):
    """Score = (t - i) log beta of the token at i, where t is the position of the next query.

    A token keeps log beta with its slot, four bytes. Protects nothing. Heads can compete for slots (``ada``).

    Learned weights per layer: ``w1`` [D, F] and ``b1`` [F] of all heads, ``w2`` [K, F] and ``b2`` [K].
    """

    name = "trim_kv"
    needs = frozenset({"hidden"})
    keeps = ("log_beta",)
    learns = "trim_kv"
    trained_by = "python -m train.retention --config FILE, as in configs/retention/embedded.yaml"
    shared = ("w1", "b1")

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        k = network.num_kv_heads
        for index, layer in enumerate(weights):
            width, hidden = layer["w1"].shape if "w1" in layer else (0, 0)
            shapes = {"w1": (width, hidden), "b1": (hidden,), "w2": (k, hidden), "b2": (k,)}
            self.check_shapes(index, layer, shapes, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Small gates whose retentions spread between 0.3 and 0.99."""
        layers = initial(key, _width(network), network.num_kv_heads, network.num_layers, 8, bias=2.0)
        return [layer | {"w2": 4 * layer["w2"]} for layer in layers]

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        if params is None:
            raise PolicyError(f"{self!r} has no gates. Pass weights=kvjax.weights_for(policy, model).")
        return {"log_beta": log_retention(params, observed.hidden)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        assert slots.seen is not None  # slots that are ranked
        return slots.meta["log_beta"] * (slots.seen - slots.pos)


def _width(network: Any) -> int:
    """D, which ``Network`` does not name."""
    return int(getattr(network, "spec", network).model_dim)


PRESETS = {"trim-kv": "trim_kv + uniform(0.25, every_step)"}

EXAMPLES = (
    Policy(eviction=TrimKV(), budget=Uniform(28, "every_step"), sinks=2, recent=6),
    Policy(eviction=TrimKV(), budget=Ada(20), sinks=2),
)
