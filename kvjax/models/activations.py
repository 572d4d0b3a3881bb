"""What a gated MLP does between its two products, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float

STEEP, LIMIT = 1.702, 7.0
"""Of gpt-oss's activation (OpenAI's reference code, ``gpt_oss/torch/model.py``, ``swiglu``)."""


def gated(kind: str, gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """The gated product; ``kind`` is ``ModelSpec.mlp``.

    "swiglu_clipped" cuts the gate from above and ``up`` on both sides, and multiplies by ``up + 1``.
    """
    if kind == "swiglu_clipped":
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(STEEP * gate) * (up + 1)
    return (jax.nn.silu(gate) if kind == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
