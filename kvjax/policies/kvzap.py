"""KVzap: hidden states say how much a repetition of the text would attend to a token; the least go.

Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, https://arxiv.org/abs/2601.07891

A linear map or a small network per layer reads the input x of attention and gives each KV head

  score = w2 x + b2      or      score = w2 GELU(x w1 + b1) + b2,

with the exact (erf) GELU, an estimate of the logarithm of KVzip+'s score (``train.zap`` trains it). A token
below the threshold does not outlive a window of 128 tokens, in the prompt and while decoding ("DMS").

kvpress 0.5.5 drops a token one read later: its query sees the window and itself. What is held is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import Admission, Eviction, Number, Observation, Part, Policy, PolicyError, Switch, Whole
from kvjax.budgets.ada import Ada
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

HIDDEN = 512
"""The authors' width of a network."""

TRAINED_BY = (
    "python -m train.zap --config FILE, as in configs/zap/kvzap.yaml, and python -m kvjax.weights "
    "convert from the authors' files"
)


def scores(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B K T"]:
    """Estimated log scores of each token by one layer's map, in float32 for any dtype of x.

    Args:
      params: ``w2`` [K, D] and ``b2`` [K]; with ``w1`` [D, F] and ``b1`` [F], ``w2`` is [K, F].
      hidden: x.
    """
    exact = jax.lax.Precision.HIGHEST
    x = hidden.astype(jnp.float32)
    if "w1" in params:
        x = jnp.einsum("btd,df->btf", x, params["w1"], precision=exact) + params["b1"]
        x = jax.nn.gelu(x, approximate=False)
    return jnp.einsum("btf,kf->bkt", x, params["w2"], precision=exact) + params["b2"][:, None]


def initial(
    key: Array, model_dim: int, kv_heads: int, num_layers: int, hidden: int | None = HIDDEN, bias: float = 0.0
) -> list[Params]:
    """Untrained maps: a list with the params of one layer each, float32.

    Args:
      key: a PRNG key.
      model_dim, kv_heads, num_layers: D, K and L of the model.
      hidden: F, or None for a linear map.
      bias: the first b2.
    """

    def one_layer(key: Array) -> Params:
        first, second = jax.random.split(key)
        width = hidden or model_dim
        last = {
            "w2": jax.random.normal(second, (kv_heads, width)) * width**-0.5,
            "b2": jnp.full(kv_heads, bias),
        }
        if hidden is None:
            return last
        w1 = jax.random.normal(first, (model_dim, hidden)) * model_dim**-0.5
        return {"w1": w1, "b1": jnp.zeros(hidden)} | last

    return [one_layer(layer_key) for layer_key in jax.random.split(key, num_layers)]


class _Maps(Part):
    """What both parts do with their weights."""

    needs = frozenset({"hidden"})
    learns = "kvzap"
    trained_by = TRAINED_BY
    shared = ("w1", "b1")

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        k, width = network.num_kv_heads, _width(network)
        for index, layer in enumerate(weights):
            expected: dict[str, tuple[int, ...]] = {"w2": (k, width), "b2": (k,)}
            if "w1" in layer:
                hidden = layer["w1"].shape[-1]
                expected = {"w1": (width, hidden), "b1": (hidden,), "w2": (k, hidden), "b2": (k,)}
            self.check_shapes(index, layer, expected, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Small networks whose scores spread around -5; that of the last layer is a linear map."""
        sizes = (_width(network), network.num_kv_heads, network.num_layers)
        linear = initial(key, *sizes, hidden=None, bias=-5.0)
        small = [layer | {"w2": 4 * layer["w2"]} for layer in initial(key, *sizes, hidden=8, bias=-5.0)]
        return [*small[:-1], linear[-1]]

    def untrained(self, model: Any, seed: int) -> list[Params]:
        """Networks of the authors' width whose scores spread around -4."""
        network = model.network
        sizes = (_width(network), network.num_kv_heads, network.num_layers)
        return [layer | {"w2": 2 * layer["w2"]} for layer in initial(jax.random.key(seed), *sizes, bias=-4.0)]

    def scored(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        if params is None:
            raise PolicyError(f"{self!r} has no weights. Pass weights=kvjax.weights_for(policy, model).")
        return scores(params, observed.hidden)


@dataclasses.dataclass(frozen=True, repr=False)
class KVzap(_Maps, Admission):
    """A token outlives the window if its score is at least ``threshold``.

    Attributes:
      threshold: of the log scores, -30 to 0; the paper's are -3 to -9, and a higher one keeps less.
      window: W, tokens that are read exactly, whatever their score.
      prefill: False reads a prompt with full attention and applies the verdict afterwards, as in the paper;
        True hides rejected tokens from the prompt's own queries, too, and never holds them: chunk by chunk.
    """

    name = "kvzap"
    arguments = {
        "threshold": Number(-30, 0, "threshold of log scores"),
        "window": Whole(1, "window"),
        "prefill": Switch(),
    }
    traced = ("threshold",)
    dial = "threshold"
    threshold: float = -4.0
    window: int = 128  # type: ignore[assignment]
    prefill: bool = False

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        return self.scored(params, observed) >= self.threshold


@dataclasses.dataclass(frozen=True, repr=False)
class KVzapScores(_Maps, Eviction):
    """The token with the lowest of KVzap's scores goes; the weights are ``kvzap``'s.

    A token keeps its score with its slot, four bytes. Protects nothing. Heads can compete (``ada``).
    """

    name = "kvzap_scores"
    keeps = ("score",)

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"score": self.scored(params, observed)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return slots.meta["score"]


def _width(network: Any) -> int:
    """D, which ``Network`` does not name."""
    return int(getattr(network, "spec", network).model_dim)


PRESETS = {"kvzap": "kvzap", "kvzap-ada": "kvzap_scores + ada(0.25)"}

EXAMPLES = (
    Policy(admission=KVzap(-5, window=24), sinks=2),
    Policy(admission=KVzap(-5, window=16, prefill=True), sinks=2),
    Policy(eviction=KVzapScores(), budget=Ada(20), sinks=2),
)
