"""Fast KVzip: a small gate on hidden states, distilled from KVzip, says which tokens stay.

Kim, Han and Yun, Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction,
https://arxiv.org/abs/2601.17668

A layer's gate reads the input x of attention. Each KV head has keys and a group's queries of d channels,

  q_g = norm(x W_q + b_q) scale_q,    k = norm(x W_k) scale_k,

with a root mean square norm, and S learned sinks s. The score is a token's share of attention among itself
and the sinks, averaged over the group:

  score = mean_g exp(q_g k / sqrt(d) + b_g) / (exp(q_g k / sqrt(d) + b_g) + sum_s exp(q_g s / sqrt(d))).

The authors' training script adds b twice; their inference, kvpress and we add it once. They cut all
layers by one threshold (``overall``); where heads of one layer compete (``ada``), kvpress says ``layerwise``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.algebra import FIRST, Admission, Eviction, Number, Observation, Part, Policy, PolicyError, Whole
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

DIM, SINKS = 16, 16
"""d and S of the authors' gates."""

NORM_EPS = 1e-6

LOCAL, LONG, LOCAL_OF_LONG = 0.02, 32_000, 4096
"""The newest tokens that stay: that share of fewer than LONG tokens, else a fixed number (the authors')."""

TRAINED_BY = (
    "python -m train.zap --config FILE, as in configs/zap/fast-kvzip.yaml, and python -m kvjax.weights "
    "convert from the authors' files"
)


def scores(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B K T"]:
    """Scores of each token by one layer's gate, above 0 and below 1; in float32 for any dtype of x.

    Args:
      params: ``w_q`` [K, G, d, D], ``b_q`` [K, G, d], ``w_k`` [K, d, D], ``scale_q`` and ``scale_k`` [d],
        ``sinks`` [K, S, d] and ``b`` [K, G].
      hidden: x.
    """
    exact = jax.lax.Precision.HIGHEST
    x = hidden.astype(jnp.float32)
    q = jnp.einsum("btd,kgcd->bktgc", x, params["w_q"], precision=exact) + params["b_q"][:, None]
    k = jnp.einsum("btd,kcd->bktc", x, params["w_k"], precision=exact)
    q, k = _normed(q) * params["scale_q"], _normed(k) * params["scale_k"]
    root = q.shape[-1] ** 0.5
    own = jnp.einsum("bktgc,bktc->bktg", q, k, precision=exact) / root + params["b"][:, None]
    sinks = jnp.einsum("bktgc,ksc->bktgs", q, params["sinks"], precision=exact) / root
    return jax.nn.sigmoid(own - jax.nn.logsumexp(sinks, axis=-1)).mean(axis=-1)


def _normed(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + NORM_EPS)


def shapes(
    model_dim: int, kv_heads: int, group: int, dim: int = DIM, sinks: int = SINKS
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's gate."""
    return {
        "w_q": (kv_heads, group, dim, model_dim),
        "b_q": (kv_heads, group, dim),
        "w_k": (kv_heads, dim, model_dim),
        "scale_q": (dim,),
        "scale_k": (dim,),
        "sinks": (kv_heads, sinks, dim),
        "b": (kv_heads, group),
    }


def initial(
    key: Array,
    model_dim: int,
    kv_heads: int,
    group: int,
    num_layers: int,
    *,
    dim: int = DIM,
    sinks: int = SINKS,
) -> list[Params]:
    """Untrained gates: a list with the params of one layer each, float32.

    Args:
      key: a PRNG key.
      model_dim, kv_heads, num_layers: D, K and L of the model.
      group: query heads of a KV head.
      dim, sinks: d and S.
    """
    leaves = shapes(model_dim, kv_heads, group, dim, sinks)

    def one_layer(key: Array) -> Params:
        first, second = jax.random.split(key)
        return {name: jnp.zeros(shape) for name, shape in leaves.items()} | {
            "w_q": jax.random.normal(first, leaves["w_q"]) * model_dim**-0.5,
            "w_k": jax.random.normal(second, leaves["w_k"]) * model_dim**-0.5,
            "scale_q": jnp.ones(dim),
            "scale_k": jnp.ones(dim),
        }

    return [one_layer(layer_key) for layer_key in jax.random.split(key, num_layers)]


class _Gates(Part):
    """What both parts do with their weights."""

    needs = frozenset({"hidden"})
    learns = "fast_kvzip"
    trained_by = TRAINED_BY
    shared = ("scale_q", "scale_k")

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        for index, layer in enumerate(weights):
            dim = layer["scale_q"].shape[-1] if "scale_q" in layer else DIM
            sinks = layer["sinks"].shape[1] if "sinks" in layer and layer["sinks"].ndim == 3 else SINKS
            self.check_shapes(index, layer, shapes(*_sizes(network)[:3], dim, sinks), network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Small gates whose scores spread over (0, 1)."""
        layers = initial(key, *_sizes(network), dim=4, sinks=3)
        drawn = jax.random.split(key, len(layers))
        return [
            layer | {"sinks": jax.random.normal(at, layer["sinks"].shape), "scale_q": jnp.full(4, 2.0)}
            for at, layer in zip(drawn, layers)
        ]

    def untrained(self, model: Any, seed: int) -> list[Params]:
        """Gates of the authors' size."""
        return initial(jax.random.key(seed), *_sizes(model.network))

    def scored(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        if params is None:
            raise PolicyError(f"{self!r} has no gates. Pass weights=kvjax.weights_for(policy, model).")
        return scores(params, observed.hidden)


@dataclasses.dataclass(frozen=True, repr=False)
class FastKVzip(_Gates, Eviction):
    """The token with the lowest score goes. A token keeps its score with its slot, four bytes.

    The newest tokens go last: one in fifty of those seen, at least one; 4096 of 32,000 or more.

    Attributes:
      sinks: first tokens, which also go last.
    """

    name = "fast_kvzip"
    arguments = {"sinks": Whole()}
    traced = ("sinks",)
    keeps = ("score",)
    sinks: int = 4

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        return {"score": self.scored(params, observed)}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        assert slots.seen is not None  # slots that are ranked
        # In whole numbers: a product in float32 may lie below the number that it should be.
        share = jnp.maximum(slots.seen // round(1 / LOCAL), 1)
        newest = jnp.where(slots.seen < LONG, share, LOCAL_OF_LONG)
        last = (slots.pos < self.sinks) | (slots.pos >= slots.seen - newest)
        return jnp.where(last, FIRST, slots.meta["score"])


@dataclasses.dataclass(frozen=True, repr=False)
class FastKVzipGate(_Gates, Admission):
    """A token outlives the window if its score is at least ``threshold``; the weights are ``fast_kvzip``'s.

    Attributes:
      threshold: above 0 and below 1.
      window: W, tokens that are read exactly, whatever their score.
    """

    name = "fast_kvzip_gate"
    arguments = {
        "threshold": Number(0, 1, "threshold of a gate", open="low high"),
        "window": Whole(1, "window"),
    }
    traced = ("threshold",)
    dial = "threshold"
    threshold: float = 0.1
    window: int = 128  # type: ignore[assignment]

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        return self.scored(params, observed) >= self.threshold


def _sizes(network: Any) -> tuple[int, int, int, int]:
    """D, which ``Network`` does not name, K, the query heads of a KV head, and L."""
    width = int(getattr(network, "spec", network).model_dim)
    group = network.num_heads // network.num_kv_heads
    return width, network.num_kv_heads, group, network.num_layers


PRESETS = {"fast-kvzip": "fast_kvzip + overall(0.25)"}

EXAMPLES = (
    Policy(eviction=FastKVzip(sinks=2), budget=Ada(20, floor=0)),
    Policy(eviction=FastKVzip(sinks=2), budget=Uniform(24, "every_step"), recent=4),
    Policy(admission=FastKVzipGate(0.3, window=16), sinks=2),
)
