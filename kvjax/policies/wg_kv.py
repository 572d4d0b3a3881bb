"""WG-KV (KV Admission): a learned gate decides on arrival which tokens outlive the window.

Huang et al., KV Admission: Learning What to Write for Efficient Long-Context LLM Inference (version 3;
before: Learning What to Write: Write-Gated KV), https://arxiv.org/abs/2512.17452

A gate is a small network per layer and KV head on the key before and after RoPE,

  g = sigmoid(w2 GELU(w1 [k_pre ; k] + b1) + b2),

with the exact (erf) GELU, as in the authors' released code. That code also divides both keys by their root
mean square and scales them before the first product. Gates converted from it have the scales as ``norm`` and
are normalised in the same way; gates without ``norm`` are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.algebra import Admission, Number, Observation, Policy, PolicyError, Whole
from kvjax.types import Heads, Network, Params, Weighted
from pallas_kernels.blockwise.api import blockwise

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

OPEN = 2.0
"""Logit at which gates start: sigmoid(2) = 0.88, so that training begins near the unchanged model (our
choice; the authors start near 0.5)."""

UNTRAINED = 0.25
"""Share of a text that untrained gates admit in measurements of speed."""

NORM_EPS = 1e-6
"""Added to the mean square where a gate normalises its keys (the authors' value)."""


def gate_logits(
    params: Params, k_pre: Float[Array, "B K T H"], k: Float[Array, "B K T H"]
) -> Float[Array, "B K T"]:
    """z, so that the gate is sigmoid(z); in float32 for any dtype of the keys.

    Args:
      params: one layer's gates: ``w1`` [K, 2H, F], ``b1`` [K, F], ``w2`` [K, F], ``b2`` [K], float32, and
        optionally ``norm`` [2H], the scales of an RMS norm over each of the two keys.
      k_pre: keys before RoPE.
      k: keys after RoPE; the same again for models without RoPE.
    """
    highest = jax.lax.Precision.HIGHEST
    keys = [k_pre.astype(jnp.float32), k.astype(jnp.float32)]
    if "norm" in params:
        keys = [key * jax.lax.rsqrt(jnp.mean(key**2, axis=-1, keepdims=True) + NORM_EPS) for key in keys]
    x = jnp.concatenate(keys, axis=-1)
    if "norm" in params:
        x = x * params["norm"]
    hidden = jnp.einsum("bkti,kif->bktf", x, params["w1"], precision=highest) + params["b1"][:, None, :]
    hidden = jax.nn.gelu(hidden, approximate=False)
    return jnp.einsum("bktf,kf->bkt", hidden, params["w2"], precision=highest) + params["b2"][:, None]


def initial(
    key: Array, kv_heads: int, head_dim: int, hidden: int | None, layers: int, *, norm: bool = False
) -> list[Params]:
    """Untrained gates, nearly open: a list with the params of one layer each, float32.

    Args:
      key: a PRNG key.
      kv_heads: K.
      head_dim: H.
      hidden: F, or None for the paper's 4 H.
      layers: L.
      norm: normalise the keys, as the authors' released gates do.
    """
    wide, hidden = 2 * head_dim, 4 * head_dim if hidden is None else hidden

    def one_layer(key: Array) -> Params:
        first, second = jax.random.split(key)
        params = {
            "w1": jax.random.normal(first, (kv_heads, wide, hidden)) / wide**0.5,
            "b1": jnp.zeros((kv_heads, hidden)),
            "w2": 0.1 * jax.random.normal(second, (kv_heads, hidden)) / hidden**0.5,
            "b2": jnp.full((kv_heads,), OPEN),
        }
        return params | ({"norm": jnp.ones(wide)} if norm else {})

    return [one_layer(layer_key) for layer_key in jax.random.split(key, layers)]


@dataclasses.dataclass(frozen=True, repr=False)
class WriteGate(Admission):
    """A token outlives the window if its learned gate is at least ``tau``.

    Attributes:
      tau: the threshold, above 0 and below 1.
      window: W, tokens that are read exactly, whatever their gate.
    """

    name = "write_gate"
    arguments = {"tau": Number(0, 1, "threshold of a gate", open="low high"), "window": Whole(1, "window")}
    traced = ("tau",)
    dial = "tau"
    needs = frozenset({"k_pre", "k"})
    learns = "wg-kv"
    trained_by = (
        "python -m train.gates --config FILE, as in configs/gates/embedded.yaml, and python -m kvjax.weights "
        "convert from the authors' files"
    )
    fitted = ("window",)
    shared = ("norm",)
    tau: float = 0.1
    window: int = 256  # type: ignore[assignment]

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        k, wide = network.num_kv_heads, 2 * network.head_dim
        for index, layer in enumerate(weights):
            hidden = layer["b1"].shape[-1] if "b1" in layer else 0
            expected = {"w1": (k, wide, hidden), "b1": (k, hidden), "w2": (k, hidden), "b2": (k,)}
            expected |= {"norm": (wide,)} if "norm" in layer else {}
            self.check_shapes(index, layer, expected, network)

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Gates that spread over (0, 1)."""
        gates = initial(key, network.num_kv_heads, network.head_dim, 8, network.num_layers)
        return [layer | {"w2": 30 * layer["w2"], "b2": 0 * layer["b2"]} for layer in gates]

    def untrained(self, model: Weighted, seed: int) -> list[Params]:
        """Gates that admit about a quarter of what the model writes."""
        tokens = min(1024, model.network.max_positions)
        return random_gates(model, UNTRAINED, self, tokens=tokens, seed=seed)

    def weight_shapes(self, network: Network) -> list[Params]:
        """Gates as wide as the paper's."""
        sizes = (network.num_kv_heads, network.head_dim, None, network.num_layers)
        return jax.eval_shape(lambda: initial(jax.random.key(0), *sizes, norm=True))

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        if params is None:
            raise PolicyError(f"{self!r} has no gates. Pass weights=kvjax.weights_for(policy, model).")
        return jax.nn.sigmoid(gate_logits(params, observed.k_pre, observed.k)) >= self.tau


def random_gates(
    model: Weighted, share: float, gate: WriteGate, *, tokens: int = 1024, seed: int = 0
) -> list[Params]:
    """Untrained gates that admit about ``share`` of any text's tokens, more in some heads than in others.

    They read only keys before RoPE, so that the share does not drift along a text. The biases are set layer
    by layer so that ``share`` of a random text passes, which each layer reads under the gates of the layers
    below.

    Args:
      model: the model whose keys they read.
      share: mean over heads, 0 to 1; the heads of a layer spread evenly around it, as far as 0 and 1 allow.
      gate: threshold and window that they will be used with.
      tokens: length of the random text.
      seed: of gates and text.

    Raises:
      PolicyError: a share outside 0 ... 1.
    """
    if not 0 <= share <= 1:
        raise PolicyError(f"random_gates: share={share} is not a share. Give a number from 0 to 1.")
    network = model.network.at(tokens)
    k, h = network.num_kv_heads, network.head_dim
    drawn = initial(jax.random.key(seed), k, h, None, network.num_layers)
    # 0.5 / k keeps every head away from the ends: none is always open or always closed.
    shares = share + min(share, 1 - share) * (1 - 0.5 / k) * np.linspace(-1, 1, k) * (k > 1)
    edge = np.log(gate.tau / (1 - gate.tau))
    gates: list[Params] = []
    at = jnp.arange(tokens)[None]

    def attend(index: int, heads: Heads, carry: None) -> tuple[jax.Array, None]:
        q, keys, k_pre, v = (jnp.swapaxes(x, 1, 2) for x in (heads.q, heads.k, heads.k_pre, heads.v))
        params = drawn[index] | {"w2": 30 * drawn[index]["w2"], "b2": jnp.zeros(k)}
        params["w1"] = params["w1"].at[:, h:].set(0)
        z = np.asarray(gate_logits(params, k_pre, keys))
        shift = [edge - np.quantile(z[0, head], 1 - shares[head]) for head in range(k)]
        gates.append(params | {"b2": jnp.asarray(shift, jnp.float32)})
        bits = jnp.asarray(z + np.asarray(shift)[:, None] >= edge)
        out, _ = blockwise(
            q, keys, v, q_pos=at, k_pos=at, window=gate.window, admit=bits, softcap=heads.softcap
        )
        return jnp.swapaxes(out, 1, 2).astype(heads.v.dtype), carry

    ids = np.random.default_rng(seed).integers(0, model.params["embed"].shape[0], (1, tokens))
    x = network.embed(model.params, jnp.asarray(ids, jnp.int32), at)
    for index, block in enumerate(model.params["layers"]):
        x, _ = network.layer(block, index, x, at, attend, None)
    return gates


PRESETS = {"wg-kv": "write_gate"}

EXAMPLES = (Policy(admission=WriteGate(tau=0.5, window=24), sinks=2),)
