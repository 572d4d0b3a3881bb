"""KVP: a learned ranker per KV head predicts future attention from key, value and position.

Moschella, Manduchi and Sener, Learning to Evict from Key-Value Cache, https://arxiv.org/abs/2602.10238
(version 2, June 2026, adds RULER up to 128k tokens)

An agent is a small network per layer and KV head; its inputs are what the cache holds of a token:

  x = key w_key + value w_value + log2(1 + p) / 16 w_log + p / 4096 w_linear + b1
  score = w_out GELU(... GELU(GELU(x) w2 + b2) ...)

with the exact (erf) GELU (our choice; the paper names none). It sees neither the prompt's length nor other
tokens, so a score is fixed when a token arrives: the same ranker works once after the prompt, at every step,
and chunk by chunk. The weights decide an agent's inputs, width and depth: an absent leaf is an input that the
agent lacks, and ``w_key_pre`` reads keys before RoPE. There is no output bias, which would change no ranking.

Ours: where a head attends to nearly all tokens, those ranked best are a biased sample of what it averages,
and a random choice disturbs its output less. A leaf ``gate`` [K] says which heads are ranked, 1, or left to
chance, 0 (``train.ranker.gate`` finds them); without it all are ranked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import FIRST, Eviction, Observation, Policy, PolicyError, Whole
from kvjax.budgets.ada import Ada
from kvjax.budgets.pyramid import Pyramid
from kvjax.budgets.uniform import Uniform
from kvjax.cache.pages import Slots
from kvjax.types import Network, Params, Weighted

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

INPUTS = ("w_key", "w_key_pre", "w_value", "w_log", "w_linear")
"""Leaves of the first product, each [K, H or 1, F]: keys after and before RoPE, values, position (twice)."""

USUAL = ("w_key", "w_value", "w_log")
"""The default inputs."""

GATE = "gate"
"""The leaf, [K]: is a head ranked?"""

HIDDEN, DEPTH = 256, 2
"""The paper's width and number of layers, including the output layer."""


def scores(
    params: Params,
    k: Float[Array, "B K T H"] | None,
    k_pre: Float[Array, "B K T H"] | None,
    v: Float[Array, "B K T H"] | None,
    pos: Int[Array, "B T"],
) -> Float[Array, "B K T"]:
    """Scores of each token by one layer's agents, in float32 for any stored dtype; higher stays.

    Args:
      params: those of ``INPUTS`` that the agents read, ``b1`` [K, F], then ``w2`` [K, F, F] and ``b2`` for a
        second hidden layer and so on, ``w_out`` [K, F].
      k, k_pre, v: may be None where ``params`` does not read them.
      pos: positions; those of padding count as 0.
    """
    exact = jax.lax.Precision.HIGHEST
    at = jnp.maximum(pos, 0).astype(jnp.float32)[:, None, :, None]
    inputs = dict(zip(INPUTS, (k, k_pre, v, jnp.log2(1 + at) / 16, at / 4096)))
    x = params["b1"][:, None, :]
    for name in (name for name in INPUTS if name in params):
        value = inputs[name]
        assert value is not None
        if value.shape[-1] == 1:
            x = x + value * params[name][:, 0, None, :]
        else:
            x = x + jnp.einsum("bkti,kif->bktf", value.astype(jnp.float32), params[name], precision=exact)
    x = jax.nn.gelu(x, approximate=False)
    for index in range(2, depth(params)):
        x = jnp.einsum("bkti,kif->bktf", x, params[f"w{index}"], precision=exact)
        x = jax.nn.gelu(x + params[f"b{index}"][:, None, :], approximate=False)
    return jnp.einsum("bktf,kf->bkt", x, params["w_out"], precision=exact)


def depth(params: Params) -> int:
    """Layers of an agent, including the output layer."""
    return 2 + sum(name[1:].isdigit() and name.startswith("w") for name in params)


def shapes(
    kv_heads: int, head_dim: int, inputs: Sequence[str] = USUAL, hidden: int = HIDDEN, layers: int = DEPTH
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's agents."""
    widths = {"w_log": 1, "w_linear": 1}
    result: dict[str, tuple[int, ...]] = {
        name: (kv_heads, widths.get(name, head_dim), hidden) for name in inputs
    }
    result["b1"] = (kv_heads, hidden)
    for index in range(2, layers):
        result |= {f"w{index}": (kv_heads, hidden, hidden), f"b{index}": (kv_heads, hidden)}
    return result | {"w_out": (kv_heads, hidden)}


def initial(
    key: Array,
    kv_heads: int,
    head_dim: int,
    num_layers: int,
    *,
    inputs: Sequence[str] = USUAL,
    hidden: int = HIDDEN,
    layers: int = DEPTH,
) -> list[Params]:
    """Untrained agents for inputs of unit variance: a list with the params of one layer each, float32.

    Args:
      key: a PRNG key.
      kv_heads: K.
      head_dim: H.
      num_layers: L, layers of the model.
      inputs: of ``INPUTS``.
      hidden: F.
      layers: of an agent, including the output layer.
    """
    leaves = shapes(kv_heads, head_dim, inputs, hidden, layers)
    width = sum(leaves[name][1] for name in inputs)

    def one_layer(key: Array) -> Params:
        keys = dict(zip(leaves, jax.random.split(key, len(leaves))))
        fan_in = {name: width if name in inputs else hidden for name in leaves}
        return {
            name: jnp.zeros(shape)
            if name.startswith("b")
            else jax.random.normal(keys[name], shape) / fan_in[name] ** 0.5
            for name, shape in leaves.items()
        }

    return [one_layer(layer_key) for layer_key in jax.random.split(key, num_layers)]


@dataclasses.dataclass(frozen=True, repr=False)
class LearnedRanker(Eviction):
    """Evicts the token with the lowest learned score; a score is fixed on arrival.

    While decoding, the score is kept with its slot, four bytes each. Where heads compete for slots (``ada``),
    the scores of two agents have no common zero. Scores of a prompt are therefore compared as
    log-probabilities to be ranked first: minus the head's logsumexp over the ranked tokens. In a head left
    to chance all ranked tokens are then about equally probable.

    Attributes:
      sinks: first tokens; they go only when no ranked token is left.
      recent: newest tokens, never evicted.
      seed: of the draws in heads left to chance.
    """

    name = "kvp"
    arguments = {"sinks": Whole(), "recent": Whole(), "seed": Whole(0, "seed", 2**32 - 1)}
    traced = ("sinks", "seed")
    needs = frozenset({"k", "k_pre", "v"})
    keeps = ("score",)
    learns = "kvp"
    trained_by = "python -m train.ranker --config FILE, as in configs/ranker/embedded.yaml"
    fitted = ("sinks",)
    sinks: int = 4
    recent: int = 16
    seed: int = 0

    def leaves(self) -> dict[str, Any]:
        return super().leaves() | {"seed": np.uint32(self.seed)}

    @property
    def protects(self) -> int:
        return self.recent

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        k, h = network.num_kv_heads, network.head_dim
        for index, layer in enumerate(weights):
            inputs = [name for name in INPUTS if name in layer]
            hidden = layer["b1"].shape[-1] if "b1" in layer else 0
            gate = {GATE: (k,)} if GATE in layer else {}
            agents = shapes(k, h, inputs or USUAL, hidden, depth(layer))
            self.check_shapes(index, layer, agents | gate, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Small agents of three layers whose scores spread; behind the first layer head 0 has no gate."""
        k, h, count = network.num_kv_heads, network.head_dim, network.num_layers
        layers = initial(key, k, h, count, hidden=8, layers=3)
        return [
            layer | {GATE: jnp.ones(k).at[0].set(float(index == 0))} for index, layer in enumerate(layers)
        ]

    def untrained(self, model: Weighted, seed: int) -> list[Params]:
        """Agents of the paper's size."""
        k, h, count = model.network.num_kv_heads, model.network.head_dim, model.network.num_layers
        return initial(jax.random.key(seed), k, h, count)

    def arrive(self, params: Params | None, observed: Observation) -> dict[str, Float[Array, "B K T"]]:
        if params is None:
            raise PolicyError(f"{self!r} has no rankers. Pass weights=kvjax.weights_for(policy, model).")
        score = scores(params, observed.k, observed.k_pre, observed.v, observed.pos)
        if GATE in params:
            score = jnp.where(params[GATE][:, None] > 0, score, observed.draws(self.seed))
        return {"score": score}

    def score(self, params: Params | None, slots: Slots) -> Float[Array, "B K C"]:
        return jnp.where(slots.pos < self.sinks, FIRST, slots.meta["score"])

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Log-probability to be ranked first among the prompt's ranked tokens; first tokens are highest."""
        score = self.arrive(params, observed)["score"]
        pos = observed.pos[:, None, :]
        ranked = (pos >= self.sinks) & (pos < (observed.total - self.recent)[:, None, None])
        whole = jax.nn.logsumexp(jnp.where(ranked, score, -jnp.inf), axis=-1, keepdims=True)
        score = score - jnp.where(jnp.isfinite(whole), whole, 0.0)
        return jnp.where(pos < self.sinks, FIRST, score)


PRESETS = {"kvp": "kvp + uniform(0.25)"}

EXAMPLES = (
    Policy(eviction=LearnedRanker(sinks=2, recent=6), budget=Uniform(24)),
    Policy(eviction=LearnedRanker(sinks=2, recent=6), budget=Uniform(28, "every_step")),
    Policy(eviction=LearnedRanker(sinks=0, recent=4), budget=Ada(20)),
    Policy(eviction=LearnedRanker(recent=6), budget=Pyramid(24)),
)
