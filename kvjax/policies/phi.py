"""φ: a summary of fixed size, made of learned features, stands in for the tokens that a read leaves out.

Hoshi, Miyashita and Deguchi, Top-K Retrieval with Fixed-Size Linear-Attention Completion (version 2:
Residual-Mass Accounting for Partial-KV Decoding), https://arxiv.org/abs/2604.05438

A layer has one map of queries per query head and one of keys per KV head, both applied after RoPE. The
paper's map,

  g0 = x Ws + bs        g1 = g0 + a (GELU(g0 W1 + b1) W2 + b2)        log φ(x) = g1 Wo + bo

with the exact (erf) GELU, is stored with all products folded that no GELU separates (``train.phi`` folds
them):

  log φ(x) = x line + GELU(x in + inner) out + last

The score of a summarised token is log sum_f φ_q(q)_f φ_k(k)_f, so only sums over tokens are kept: F (H + 2)
floats per KV head, and a count. The paper has no mode without a selection: φ then absorbs the tokens that
admission rejects and eviction drops.

The weights decide the width of the block, and whether the maps are asymmetric: without maps of queries, those
of keys serve both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Completion, Policy, PolicyError, Visited, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Network, Params, Weighted, pytree
from pallas_kernels.phi.api import Summary, phi_build, phi_evaluate, phi_subtract

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

LEAVES = ("line", "in", "inner", "out", "last")
"""Leaves of a map, with the side as a suffix: ``line_k``; see above."""

FAR = 2.0
"""kvjax warns of prompts that are more than this many times longer or shorter than those of the training."""


def log_features(params: Params, side: str, x: Float[Array, "B X T H"]) -> Float[Array, "B X T F"]:
    """log φ of queries ("q", X = N) or keys ("k", X = K), in float32 for any input dtype.

    Args:
      params: a layer's maps, see ``shapes``.
      side: whose map; queries use that of their KV head where they have none of their own.
      x: queries or keys after RoPE.
    """
    x = x.astype(jnp.float32)
    if side == "q" and "line_q" not in params:
        b, n, t, h = x.shape
        heads = params["line_k"].shape[0]
        return log_features(params, "k", x.reshape(b, heads, -1, h)).reshape(b, n, t, -1)
    line, into, inner, out, last = (params[f"{name}_{side}"] for name in LEAVES)

    def times(x: Array, w: Array) -> Array:
        return jnp.einsum("bxti,xio->bxto", x, w, precision=jax.lax.Precision.HIGHEST)

    block = jax.nn.gelu(times(x, into) + inner[:, None], approximate=False)
    return times(x, line) + times(block, out) + last[:, None]


def shapes(
    heads: int, kv_heads: int, head_dim: int, features: int, hidden: int, *, symmetric: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's maps, [N or K, ...]; ``length`` [1] is that of the training prompts."""
    result: dict[str, tuple[int, ...]] = {"length": (1,)}
    sizes = (head_dim, features), (head_dim, hidden), (hidden,), (hidden, features), (features,)
    for side, x in (("k", kv_heads),) if symmetric else (("k", kv_heads), ("q", heads)):
        result |= {f"{name}_{side}": (x, *size) for name, size in zip(LEAVES, sizes)}
    return result


def random_maps(
    key: Array, network: Network, features: int, *, hidden: int | None = None, block: float = 0.0
) -> list[Params]:
    """Random features of exp(q k / sqrt(H)) with the same directions for the heads of a group.

    Args:
      key: a PRNG key.
      network: the model's layers and heads.
      features: F.
      hidden: width of the block; H / 2 by default.
      block: weight of the block.

    Returns:
      One layer's maps each; their ``length`` is 0, for unknown.
    """
    h, n, k = network.head_dim, network.num_heads, network.num_kv_heads
    leaves = shapes(n, k, h, features, hidden or max(h // 2, 1), symmetric=False)

    def one_layer(key: Array) -> Params:
        maps = {name: jnp.zeros(shape, jnp.float32) for name, shape in leaves.items()}
        first, second, third = jax.random.split(key, 3)
        line = jax.random.normal(third, leaves["line_k"]) * h**-0.25
        for side in ("k", "q"):
            into, out = leaves[f"in_{side}"], leaves[f"out_{side}"]
            maps[f"line_{side}"] = jnp.repeat(line, out[0] // k, axis=0)
            maps[f"in_{side}"] = jax.random.normal(first, into) * h**-0.5
            maps[f"out_{side}"] = block * jax.random.normal(second, out) * out[1] ** -0.5
            maps[f"last_{side}"] = jnp.full((out[0], features), -0.5 * jnp.log(features))
        return maps

    return [one_layer(layer_key) for layer_key in jax.random.split(key, network.num_layers)]


@pytree()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Absorbed:
    """What φ holds for each row and KV head.

    Attributes:
      sums: see ``pallas_kernels.phi``.
      count: number of tokens in it.
    """

    sums: Summary
    count: Int[Array, "B K"]


@dataclasses.dataclass(frozen=True, repr=False)
class Phi(Completion):
    """Attention to the tokens that a read leaves out, estimated from ``features`` learned features.

    With a selection it absorbs the middle of the prompt, and a read subtracts what it visits. Without one it
    absorbs what is rejected or evicted; values of INT8 and INT4 pages are absorbed as they would be read.

    Attributes:
      features: d_φ, the same as in the weights.
    """

    name = "phi"
    arguments = {"features": Whole(1, "number of features", 4096)}
    learns = "phi"
    shared = ("length",)
    trained_by = "python -m train.phi --config FILE, as in configs/phi/embedded.yaml"
    features: int = 64

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        n, k, h = network.num_heads, network.num_kv_heads, network.head_dim
        for index, layer in enumerate(weights):
            features = layer["last_k"].shape[-1] if "last_k" in layer else self.features
            if features != self.features:
                raise PolicyError(
                    f"{self!r}: the maps of layer {index} have {features} features. Write phi({features}), "
                    f"or use maps trained for {self.features}."
                )
            symmetric = not any(name.endswith("_q") for name in layer)
            hidden = layer["inner_k"].shape[-1] if "inner_k" in layer else h
            self.check_shapes(index, layer, shapes(n, k, h, features, hidden, symmetric=symmetric), network)

    def remark(self, weights: Sequence[Params], lengths: Sequence[int]) -> str | None:
        """Warns of prompts far from the length that the maps were trained for."""
        trained = int(np.asarray(weights[0]["length"])[0])
        far = [n for n in lengths if trained and not trained / FAR <= n <= trained * FAR]
        if not far:
            return None
        span = f"{min(far)}" if min(far) == max(far) else f"{min(far)} to {max(far)}"
        return (
            f"{self!r}: the maps were trained for prompts of {trained} tokens and read prompts of {span}; "
            "their estimates are less accurate there. Use maps trained for such prompts."
        )

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        return random_maps(key, network, self.features, hidden=6, block=0.5)

    def untrained(self, model: Weighted, seed: int) -> list[Params]:
        """Maps of the default widths."""
        return random_maps(jax.random.key(seed), model.network, self.features)

    def empty(self, rows: int, heads: int, head_dim: int, context: int) -> Absorbed:
        shape = (rows, heads, self.features)
        sums = Summary(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        return Absorbed(sums=sums, count=jnp.zeros(shape[:2], jnp.int32))

    def absorb(
        self,
        params: Params | None,
        summary: Absorbed,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        pos: Int[Array, "B K T"],
        take: Bool[Array, "B K T"],
    ) -> Absorbed:
        log_k = log_features(self._maps(params), "k", k)
        sums = phi_build(log_k, v, there=take, onto=summary.sums)
        return Absorbed(sums=sums, count=summary.count + take.sum(axis=-1))

    def read(
        self, params: Params | None, summary: Absorbed, q: Float[Array, "B N T H"], visited: Visited | None
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
        """The partial of everything absorbed, minus what this read visited; (0, -inf) if nothing is left."""
        params, sums, left = self._maps(params), summary.sums, summary.count
        if visited is not None:
            k, v = (x.astype(jnp.float32) for x in (visited.k, visited.v))
            sums = phi_subtract(sums, log_features(params, "k", k), v, there=visited.live)
            left = left - visited.live.sum(axis=-1)
        out, lse = phi_evaluate(sums, log_features(params, "q", q))
        some = jnp.repeat(left > 0, q.shape[1] // left.shape[1], axis=1)[..., None]
        return jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, -jnp.inf)

    def _maps(self, params: Params | None) -> Params:
        if params is None:
            raise PolicyError(f"{self!r} has no maps. Pass weights=kvjax.weights_for(policy, model).")
        return params


PRESETS = {"topk-phi": "topk(0.01) + phi(64)"}

EXAMPLES = (Policy(budget=Uniform(24, "every_step"), completion=Phi(4)),)
