"""The decoder as a Flax NNX module: where the weights are declared and drawn.

The module holds the leaves and nothing else. Training, inference and every cache read them through
``leaves``, in the tree of ``kvjax.models.decoder``; NNX owns names, initial draws and state.
This file imports flax, so nothing that ``import kvjax`` touches imports this file.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models import decoder
from kvjax.models.layout import drawn
from kvjax.models.spec import ModelSpec
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

STDDEV = 0.02
"""Standard deviation of every drawn weight (GPT-2's)."""

RESIDUAL_WRITERS = ("wo", "w_down", "experts_down")
"""Leaves that add to the residual stream: 2 L of them, so each is drawn sqrt(2 L) smaller."""


def draw(spec: ModelSpec, name: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> Array:
    """The initial value of one leaf, float32: norms do nothing yet, biases zero, the rest normal."""
    return drawn(functools.partial(_draw, spec, rngs), name, shape)  # type: ignore[no-any-return]


def _draw(spec: ModelSpec, rngs: nnx.Rngs, name: str, shape: tuple[int, ...]) -> Array:
    if name.endswith("norm"):
        return jnp.full(shape, 0.0 if spec.norm == "rms_plus_one" else 1.0, jnp.float32)
    if name.endswith("bias") or name.startswith("b") or name == "sinks":
        return jnp.zeros(shape, jnp.float32)
    scale = STDDEV / math.sqrt(2 * spec.num_layers) if name in RESIDUAL_WRITERS else STDDEV
    return scale * jax.random.normal(rngs.params(), shape, jnp.float32)


class Block(nnx.Module):
    """The weights of one layer, one ``nnx.Param`` per leaf of ``decoder.shapes(spec)["layers"][i]``."""

    def __init__(self, spec: ModelSpec, names: dict[str, tuple[int, ...]], *, rngs: nnx.Rngs):
        for name, shape in names.items():
            setattr(self, name, nnx.Param(draw(spec, name, shape, rngs)))


class Decoder(nnx.Module):
    """A decoder of any family.

    Layers are attributes ``layer_0``, ``layer_1``, ... because a list of submodules is spelled
    differently before and after Flax 0.12.

    Attributes:
      spec: static sizes.
      embed, final_norm, ...: the leaves outside the layers, as in ``kvjax.models.decoder``.
    """

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        tree = decoder.shapes(spec)
        for name, shape in tree.items():
            if name != "layers":
                setattr(self, name, nnx.Param(draw(spec, name, shape, rngs)))
        for index, names in enumerate(tree["layers"]):
            setattr(self, f"layer_{index}", Block(spec, names, rngs=rngs))

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole sequences by dense attention; positions 0 .. T-1."""
        return decoder.dense_logits(self.spec, leaves(self), tokens)


def leaves(module: Decoder) -> Params:
    """The module's weights as the params tree of ``kvjax.models.decoder``; arrays, not copies."""
    tree = decoder.shapes(module.spec)
    params: Params = {name: getattr(module, name)[...] for name in tree if name != "layers"}
    params["layers"] = [
        {name: getattr(getattr(module, f"layer_{index}"), name)[...] for name in names}
        for index, names in enumerate(tree["layers"])
    ]
    return params
