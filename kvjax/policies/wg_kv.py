"""WG-KV: a learned gate says on arrival which tokens outlive the window.

Huang et al., Learning What to Write: Write-Gated KV for Efficient Long-Context Inference,
https://arxiv.org/abs/2512.17452

A gate is a small network per layer and KV head on the key before and after RoPE,

  g = sigmoid(w2 GELU(w1 [k_pre ; k] + b1) + b2),

with the exact (erf) GELU, as the authors' released code has it. That code also divides both keys by their
root mean square and scales them before the first product; gates converted from it carry the scales as
``norm`` and are normalised the same way, gates without ``norm`` are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Admission, Number, Observation, Policy, PolicyError, Whole
from kvjax.types import Network, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

OPEN = 2.0
"""Logit at which gates start: sigmoid(2) = 0.88, so that training begins near the untouched model (chosen;
the authors start near 0.5)."""

NORM_EPS = 1e-6
"""Added to the mean square where a gate normalises its keys (the authors' value)."""


def gate_logits(
    params: Params, k_pre: Float[Array, "B K T H"], k: Float[Array, "B K T H"]
) -> Float[Array, "B K T"]:
    """z, so that the gate is sigmoid(z), in float32 whatever the keys are held in.

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
    """Untrained gates, nearly open: a list of one layer's params each, float32.

    Args:
      key: a PRNG key.
      kv_heads: K.
      head_dim: H.
      hidden: F, or None for the paper's 4 H.
      layers: L.
      norm: normalise the keys, as the authors' released gates do.
    """
    wide, hidden = 2 * head_dim, 4 * head_dim if hidden is None else hidden

    def one(key: Array) -> Params:
        first, second = jax.random.split(key)
        params = {
            "w1": jax.random.normal(first, (kv_heads, wide, hidden)) / wide**0.5,
            "b1": jnp.zeros((kv_heads, hidden)),
            "w2": 0.1 * jax.random.normal(second, (kv_heads, hidden)) / hidden**0.5,
            "b2": jnp.full((kv_heads,), OPEN),
        }
        return params | ({"norm": jnp.ones(wide)} if norm else {})

    return [one(at_layer) for at_layer in jax.random.split(key, layers)]


@dataclasses.dataclass(frozen=True, repr=False)
class WriteGate(Admission):
    """A token outlives the window where its learned gate is at least ``tau``.

    Attributes:
      tau: the threshold, above 0 and below 1.
      window: W, tokens that are read exactly whatever their gate.

    Raises:
      PolicyError: tau outside (0, 1), or window < 1.
    """

    name = "write_gate"
    arguments = {
        "tau": Number(0, 1, "threshold of a gate", open="low high"),
        "window": Whole(1, "window"),
    }
    dials = ("tau",)
    needs = frozenset({"k_pre", "k"})
    learns = "wg-kv"
    fitted = ("window",)
    tau: float = 0.1
    window: int = 256  # type: ignore[assignment]

    def check_weights(self, weights: Sequence[Params], network: Network) -> None:
        """Names and shapes of ``gate_logits``.

        Raises:
          PolicyError: others.
        """
        k, wide = network.num_kv_heads, 2 * network.head_dim
        for index, layer in enumerate(weights):
            hidden = layer["b1"].shape[-1] if "b1" in layer else 0
            right = {"w1": (k, wide, hidden), "b1": (k, hidden), "w2": (k, hidden), "b2": (k,)}
            right |= {"norm": (wide,)} if "norm" in layer else {}
            found = {name: tuple(value.shape) for name, value in layer.items()}
            if found != right:
                raise PolicyError(
                    f"{self!r}: the gates of layer {index} have shapes {found}, and a model of {k} KV heads "
                    f"of {network.head_dim} needs {right}. Use gates trained for this model."
                )

    def example_weights(self, key: Array, network: Network) -> list[Params]:
        """Gates that spread over (0, 1)."""
        gates = initial(key, network.num_kv_heads, network.head_dim, 8, network.num_layers)
        return [layer | {"w2": 30 * layer["w2"], "b2": 0 * layer["b2"]} for layer in gates]

    def admit(self, params: Params | None, observed: Observation) -> Bool[Array, "B K T"]:
        """Gate at least tau."""
        if params is None:
            raise PolicyError(f"{self!r} has no gates. Pass weights=kvjax.weights_for(policy, model).")
        return jax.nn.sigmoid(gate_logits(params, observed.k_pre, observed.k)) >= self.tau


PRESETS = {"wg-kv": "write_gate"}

EXAMPLES = (Policy(admission=WriteGate(tau=0.5, window=24), sinks=2),)
