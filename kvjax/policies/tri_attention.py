"""TriAttention: keeps keys that the mean query of a head will meet at many later distances, by calibration.

Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression,
https://arxiv.org/abs/2604.04921; details as in the authors' code (github.com/WeianMao/triattention).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Every, Eviction, Observation, Policy, PolicyError, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Network, Params, Rotate

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EXACT = jax.lax.Precision.HIGHEST

LEAST = 1e-6
"""The smallest standard deviation that scores are divided by."""


@dataclasses.dataclass(frozen=True, repr=False)
class TriAttention(Eviction):
    """Score = expected product of key and query, from the key and its distance alone; protects nothing.

    RoPE turns pairs f of channels. With a head's mean query E q before RoPE and a key k at distance d, the
    series sum of |E q_f| |k_f| cos(w_f d + angle) is the product of k with E q turned to the query's
    position. It is averaged over queries 1, 2, 4 ... ``ahead`` positions after the newest token. Added is
    the sum of (1 - r_f) E|q_f| |k_f|, where r_f = |E q_f| / E|q_f| says how concentrated the pair is. Per
    query head the scores of the held tokens are reduced to mean 0 and deviation 1; of a group's heads the
    highest counts. Channels that RoPE does not turn are pairs of one.

    The authors act every 128 tokens and keep the prompt: ``uniform(1024, when=every(128), prompt=keep)``.

    Learned weights: ``mean`` [N, H], E q, and ``length`` [N, H], E|q_f| of each channel's pair.

    Attributes:
      ahead: the largest distance.
    """

    name = "tri_attention"
    arguments = {"ahead": Whole(1, "number of positions", 2**20)}
    needs = frozenset({"k"})
    scores_prompt = ranks_held = True
    learns = "tri_attention"
    trained_by = "python -m train.queries --config FILE --part tri_attention --export FILE"
    ahead: int = 65_536

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        shape = network.num_heads, network.head_dim
        for index, layer in enumerate(weights):
            self.check_shapes(index, layer, {"mean": shape, "length": shape}, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        shape = network.num_heads, network.head_dim

        def one_layer(key: Array) -> Params:
            mean, more = jax.random.normal(key, shape), jax.random.uniform(key, shape)
            return {"mean": mean, "length": jnp.abs(mean) + more}

        return [one_layer(layer_key) for layer_key in jax.random.split(key, network.num_layers)]

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        if params is None:
            raise PolicyError(f"{self!r} has no centres. Pass weights=kvjax.weights_for(policy, model).")
        real, rotate = (observed.pos >= 0)[:, None, None], observed.rotate
        k = jnp.where((observed.pos >= 0)[:, None, :, None], observed.k.astype(jnp.float32), 0.0)
        rows, heads, _, h = k.shape
        mean = self._turned(observed, params["mean"]).reshape(rows, heads, -1, h)
        series = jnp.einsum("bkgh,bkth->bkgt", mean, k, precision=EXACT)
        together, scale = pairs(rotate, h), amplitudes(rotate, h)
        spread = params["length"] - pair_lengths(params["mean"], together)
        spread = (spread * scale / together.sum(axis=-1)).reshape(heads, -1, h)
        norm = jnp.einsum("kgh,bkth->bkgt", spread, pair_lengths(k, together), precision=EXACT)
        score = jnp.where(real, series + norm, 0.0)
        count = jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
        score = jnp.where(real, score - score.sum(axis=-1, keepdims=True) / count, 0.0)
        deviation = jnp.sqrt((score**2).sum(axis=-1, keepdims=True) / count)
        return (score / jnp.maximum(deviation, LEAST)).max(axis=2)

    def _turned(self, observed: Observation, mean: Float[Array, "N H"]) -> Float[Array, "B N H"]:
        """The mean query turned to later positions, averaged over them."""
        rotate = observed.rotate
        if rotate is None:
            return jnp.broadcast_to(mean, (observed.pos.shape[0], *mean.shape))
        later = 2 ** jnp.arange(self.ahead.bit_length())  # 1, 2, 4 ... up to ``ahead``
        queries = jnp.broadcast_to(mean.astype(jnp.float32), (1, len(later), *mean.shape))
        return jax.lax.map(lambda total: rotate(queries, (total + later)[None]).mean((0, 1)), observed.total)


def pairs(rotate: Rotate | None, head_dim: int) -> Bool[Array, "H H"]:
    """Which channels RoPE turns together; a channel belongs to itself."""
    basis = jnp.eye(head_dim)
    if rotate is None:
        return basis > 0
    return rotate(basis[None, None], jnp.ones((1, 1), jnp.int32))[0, 0] != 0


def amplitudes(rotate: Rotate | None, head_dim: int) -> Float[Array, " H"]:
    """The factor on each channel where RoPE also stretches (YaRN), else 1."""
    one = jnp.ones((1, 1, 1, head_dim))
    return one[0, 0, 0] if rotate is None else rotate(one, jnp.zeros((1, 1), jnp.int32))[0, 0, 0]


def pair_lengths(x: Float[Array, "... H"], together: Bool[Array, "H H"]) -> Float[Array, "... H"]:
    """Of each channel the length of its pair."""
    return jnp.sqrt(jnp.einsum("...h,hi->...i", x.astype(jnp.float32) ** 2, together, precision=EXACT))


PRESETS = {"tri-attention": "tri_attention + uniform(1024, when=every(128), prompt=keep)"}

EXAMPLES = (Policy(eviction=TriAttention(ahead=64), budget=Uniform(24, Every(8)), recent=4),)
