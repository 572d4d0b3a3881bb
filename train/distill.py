"""Distillation of a frozen model: its forward pass with and without gates, and the loss between the two.

The student attends with ``log(g + eps)`` added to the scores of keys outside the window (WG-KV,
arXiv 2512.17452, section 3). Teacher and student run the same kernel, the teacher with log gates of 0, so
that gates of 1 have a loss of exactly 0. Layers are scanned, so all must have the same mathematics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.sharding.specs import HEADS, RESIDUAL
from kvjax.types import Heads, Network, Params
from pallas_kernels.gated.api import gated
from train.mesh import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from kvjax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedModel:
    """The static arguments of a forward pass.

    Attributes:
      network: the backbone; all its layers attend fully.
      layout: the mesh of all arrays.
      window: W, the latest keys, which no gate touches.
      sinks: first keys, which thresholded gates leave open, as ``sinks(n)`` does when served.
      eps: what a closed gate leaves.
      concrete: gates are drawn from the hard-concrete distribution while training.
      remat: keep only the residual stream of each layer for the backward pass and recompute the rest.
      impl: of the attention kernel.
    """

    network: Network
    layout: Layout
    window: int
    sinks: int = 0
    eps: float = 1e-6
    concrete: bool = False
    remat: bool = False
    impl: str | None = None


LayerAttention = Callable[[Params, Heads], "tuple[Array, Array]"]
"""``(trained leaves of the layer, heads) -> (mixed values [B, T, N, H], a result for the loss)``."""


def log_gate(z: Float[Array, ...], eps: float) -> Float[Array, ...]:
    """log(sigmoid(z) + eps), with a gradient that does not vanish in rounding."""
    return jnp.logaddexp(jax.nn.log_sigmoid(z), math.log(eps))


TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
"""Of the hard-concrete distribution, as its paper has them."""


def concrete_gate(z: Float[Array, ...], key: Array) -> Float[Array, ...]:
    """Gates drawn from the hard-concrete distribution with location z (Louizos et al., 2018, section 2.2).

    Source: https://arxiv.org/abs/1712.01312. Many are exactly 0 or 1.
    """
    noise = jax.random.logistic(key, z.shape)
    return jnp.clip(jax.nn.sigmoid((z + noise) / TEMPERATURE) * (HIGH - LOW) + LOW, 0.0, 1.0)


def open_probability(z: Float[Array, ...]) -> Float[Array, ...]:
    """How likely ``concrete_gate`` is not 0 (section 2.2 there)."""
    return jax.nn.sigmoid(z - TEMPERATURE * math.log(-LOW / HIGH))


def soft_slots(z: Float[Array, ...]) -> Float[Array, ...]:
    """What a soft gate g counts for: ``g + g (1 - g)``, which also draws it to 0 or 1 (WG-KV, section 3)."""
    g = jax.nn.sigmoid(z)
    return g + g * (1 - g)


def hard_gate(z: Float[Array, ...], tau: float | Array) -> Float[Array, ...]:
    """The log gate of inference: 0 where the gate is at least tau, else -inf."""
    return jnp.where(jax.nn.sigmoid(z) >= tau, 0.0, -jnp.inf)


def gated_attention(model: GatedModel, x: Heads, log_gates: Float[Array, "B K T"]) -> Float[Array, "B T N H"]:
    """Attention under gates; each device computes its own rows and heads."""

    def local(q: Array, k: Array, v: Array, g: Array) -> Array:
        return gated(q, k, v, g, window=model.window, softcap=x.softcap, impl=model.impl)[0]

    q, k, v = (jnp.swapaxes(part, 1, 2) for part in (x.q, x.k, x.v))
    out = model.layout.mesh.each(local, (q, k, v, log_gates), (HEADS,) * 4, HEADS)
    return jnp.swapaxes(out, 1, 2).astype(x.v.dtype)


def gated_layer(
    model: GatedModel, logits: Callable[..., Array], threshold: float | Array | None = None
) -> LayerAttention:
    """Attention under gates of ``logits(leaves, k_pre, k)``, soft or thresholded; also returns their z.

    Leaves with a key called ``draw`` have their gates drawn.
    """

    def attend(leaves: Params, x: Heads) -> tuple[Array, Array]:
        z = logits(leaves, jnp.swapaxes(x.k_pre, 1, 2), jnp.swapaxes(x.k, 1, 2))
        if "draw" in leaves:
            log_gates = jnp.log(concrete_gate(z, leaves["draw"]) + model.eps)
        elif threshold is None:
            log_gates = log_gate(z, model.eps)
        else:
            log_gates = hard_gate(z, threshold).at[..., : model.sinks].set(0.0)
        return gated_attention(model, x, log_gates), z

    return attend


def forward(
    model: GatedModel, backbone: Params, trained: Any, tokens: Int[Array, "B T"], attend: LayerAttention
) -> tuple[Float[Array, "B T D"], Any]:
    """Tokens to the last layer's output, before the final norm.

    Args:
      model: static arguments.
      backbone: weights of ``train.mesh.stacked``.
      trained: a tree whose leaves begin with [L], the leaves of each layer for ``attend``; or None.
      tokens: whole rows, no padding.
      attend: attention of one layer.

    Returns:
      (output, the second results of ``attend``, stacked [L, ...]).
    """
    network = model.network.at(tokens.shape[1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    pin = functools.partial(model.layout.mesh.pinned, spec=RESIDUAL)

    def block(x: Array, layer: tuple[Params, Any]) -> tuple[Array, Array]:
        weights, leaves = layer

        def attend_layer(_: int, heads: Heads, carry: Any) -> tuple[Array, Any]:
            return attend(leaves, heads)

        x, seen = network.layer(weights, 0, x, positions, attend_layer, None)
        return pin(x), seen

    body = jax.checkpoint(block, prevent_cse=False) if model.remat else block
    x = pin(network.embed(backbone, tokens, positions))
    return jax.lax.scan(body, x, (backbone["layers"], trained))


def teacher_states(model: GatedModel, backbone: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """``final_states`` of the model without gates; no gradient flows back through them."""
    model = dataclasses.replace(model, remat=False)

    def attend(_: Params, x: Heads) -> tuple[Array, Array]:
        b, t, k, _h = x.k.shape
        return gated_attention(model, x, jnp.zeros((b, k, t))), jnp.zeros(())

    x, _ = forward(model, backbone, None, tokens, attend)
    return jax.lax.stop_gradient(final_states(model, backbone, x))


def final_states(model: GatedModel, backbone: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, float32; of a network that names none, at a mean square of 1."""
    x, normed = x.astype(jnp.float32), getattr(model.network, "normed", None)
    if normed is not None:
        return normed(backbone, x)  # type: ignore[no-any-return]
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def distillation_loss(
    model: GatedModel, backbone: Params, x: Float[Array, "B T D"], teacher: Float[Array, "B T D"]
) -> Float[Array, ""]:
    """Mean squared error over tokens and channels between a forward pass and the teacher's states."""
    return jnp.mean((final_states(model, backbone, x) - teacher) ** 2)


def gate_cost(slots: Float[Array, "L B K T"], window: int, kind: str) -> Float[Array, ""]:
    """What gates cost, in shares of the cache.

    ``paper`` is the mean of ``slots``, what each token counts for. ``window`` counts a slot that the window
    of the row's last queries holds anyway: ``c_t = o_t + (1 - o_t) slots_t``, ``o_t = min(1, W / (N - t))``.
    """
    if kind == "window":
        n = slots.shape[-1]
        held = jnp.minimum(1.0, window / (n - jnp.arange(n)))
        slots = held + (1 - held) * slots
    return jnp.mean(slots)


def kept_shares(z: Float[Array, "L B K T"], window: int, tau: float | Array) -> tuple[Array, Array]:
    """Of the tokens outside the last window: (mean gate, share of gates >= tau)."""
    g = jax.nn.sigmoid(z[..., : max(1, z.shape[-1] - window)])
    return jnp.mean(g), jnp.mean(g >= tau)


def stack_layers(layers: list[Params]) -> Params:
    """Trained leaves of all layers as ``forward`` takes them, [L, ...]."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def check_model(model: ModelSpec | Network, tensor: int) -> None:
    """Refuses a model that ``forward`` cannot run.

    Raises:
      ValueError: layers that differ (sliding, without RoPE), or KV heads that do not divide over the mesh.
    """
    if getattr(getattr(model, "spec", model), "unturned", ()):
        raise ValueError(
            "gates for a model some of whose layers have no RoPE: training runs one program for all layers. "
            "Choose a model whose layers are all alike."
        )
    spec = getattr(model, "spec", model)
    if getattr(spec, "sinks", False):
        raise ValueError(
            "gates for a model with attention sinks: the gated attention of training has no term for them. "
            "Choose a model without."
        )
    if getattr(getattr(spec, "experts", None), "dense_layers", ()):
        raise ValueError(
            "gates for a model some of whose layers have no experts: training runs one program for all "
            "layers. Choose a model whose layers are all alike."
        )
    if any(window is not None for window in model.windows):
        raise ValueError(
            f"gates for a {getattr(model, 'family', 'model')} with sliding-window layers: such a layer is a "
            "ring already and takes no admission. Choose a model whose layers all attend fully."
        )
    if model.num_kv_heads % tensor:
        raise ValueError(
            f"mesh: {{tensor: {tensor}}} does not divide the model's {model.num_kv_heads} KV heads. Make "
            "tensor a divisor of them."
        )
