"""A frozen model walked twice over the same tokens, as it is and with gates, and what sets the two apart.

The student attends with ``log(g + eps)`` added to the scores of keys outside the window (WG-KV,
arXiv 2512.17452, section 3). Both walks run the same kernel, the teacher's with log gates of nought, so
gates of one cost nothing. Layers are one scan: all have the same mathematics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.sharding.specs import HEADS, RESIDUAL
from kvjax.types import AttendFn, Heads, Params
from pallas_kernels.gated.api import gated
from train.mesh import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Net:
    """What is static in a walk.

    Attributes:
      spec: the backbone; its layers all attend fully.
      layout: where arrays live.
      window: W, latest keys that no gate touches.
      eps: what a closed gate leaves.
      remat: keep one residual stream a layer for the backward pass and compute the rest again.
      impl: of the attention kernel.
    """

    spec: ModelSpec
    layout: Layout
    window: int
    eps: float = 1e-6
    remat: bool = False
    impl: str | None = None


Layer = Callable[[Params, Heads], "tuple[Array, Array]"]
"""``(trained leaves of the layer, heads) -> (mixed values [B, T, N, H], what the loss wants to see)``."""


def log_gate(z: Float[Array, ...], eps: float) -> Float[Array, ...]:
    """log(sigmoid(z) + eps), with a gradient that does not vanish in rounding."""
    return jnp.logaddexp(jax.nn.log_sigmoid(z), math.log(eps))


def hard_gate(z: Float[Array, ...], tau: float | Array) -> Float[Array, ...]:
    """0 where the gate is at least tau, else -inf: what inference does."""
    return jnp.where(jax.nn.sigmoid(z) >= tau, 0.0, -jnp.inf)


def attend(net: Net, x: Heads, log_gates: Float[Array, "B K T"]) -> Float[Array, "B T N H"]:
    """Gated attention; each device has the rows and heads of its place in the mesh."""

    def local(q: Array, k: Array, v: Array, g: Array) -> Array:
        return gated(q, k, v, g, window=net.window, softcap=x.softcap, impl=net.impl)[0]

    q, k, v = (jnp.swapaxes(part, 1, 2) for part in (x.q, x.k, x.v))
    out = net.layout.mesh.each(local, (q, k, v, log_gates), (HEADS,) * 4, HEADS)
    return jnp.swapaxes(out, 1, 2).astype(x.v.dtype)


def untouched(net: Net) -> Layer:
    """The model's own attention."""

    def layer(_: Params, x: Heads) -> tuple[Array, Array]:
        b, t, k, _h = x.k.shape
        return attend(net, x, jnp.zeros((b, k, t))), jnp.zeros(())

    return layer


def gated_by(net: Net, logits: Callable[..., Array], threshold: float | Array | None = None) -> Layer:
    """Attention under gates ``logits(leaves, k_pre, k)``, soft, or hard at a threshold; gives their z."""

    def layer(leaves: Params, x: Heads) -> tuple[Array, Array]:
        z = logits(leaves, jnp.swapaxes(x.k_pre, 1, 2), jnp.swapaxes(x.k, 1, 2))
        return attend(net, x, log_gate(z, net.eps) if threshold is None else hard_gate(z, threshold)), z

    return layer


def walk(
    net: Net, backbone: Params, trained: Any, tokens: Int[Array, "B T"], layer: Layer
) -> tuple[Float[Array, "B T D"], Any]:
    """Tokens to the last layer's output, before the final norm.

    Args:
      net: static settings.
      backbone: weights of ``train.mesh.stacked``.
      trained: a tree whose leaves begin with [L]: each layer's leaves for ``layer``; or None.
      tokens: whole rows, no padding.
      layer: attention of one layer.

    Returns:
      (output, what the layers gave to see, stacked [L, ...]).
    """
    spec = net.spec.at(tokens.shape[1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    pin = functools.partial(net.layout.mesh.pinned, spec=RESIDUAL)

    def block(x: Array, leaves: tuple[Params, Any]) -> tuple[Array, Array]:
        weights, mine = leaves

        def seam(_: int, heads: Heads, seen: Any) -> tuple[Array, Any]:
            return layer(mine, heads)

        seam_: AttendFn[Any] = seam
        x, seen = decoder.layer(spec, weights, 0, x, positions, seam_, None)
        return pin(x), seen

    body = jax.checkpoint(block, prevent_cse=False) if net.remat else block
    x = pin(decoder.embed(spec, backbone, tokens, positions))
    return jax.lax.scan(body, x, (backbone["layers"], trained))


def teacher(net: Net, backbone: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The untouched model's ``states``; nothing flows back through them."""
    frozen = dataclasses.replace(net, remat=False)
    x, _ = walk(frozen, backbone, None, tokens, untouched(frozen))
    return jax.lax.stop_gradient(states(net, backbone, x))


def states(net: Net, backbone: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, float32: what is compared."""
    return decoder.norm(net.spec, backbone, "final_norm", x.astype(jnp.float32))


def apart(
    net: Net, backbone: Params, x: Float[Array, "B T D"], goal: Float[Array, "B T D"]
) -> Float[Array, ""]:
    """Mean squared error over tokens and channels of a walk's output to the teacher's states."""
    return jnp.mean((states(net, backbone, x) - goal) ** 2)


def cost(z: Float[Array, "L B K T"], window: int, kind: str) -> Float[Array, ""]:
    """What gates cost, in shares of the cache.

    ``paper`` is the mean of ``g + g (1 - g)``. ``window`` counts a slot that the window of the row's last
    queries holds anyway: ``c_t = o_t + (1 - o_t) (g + g (1 - g))`` with ``o_t = min(1, W / (N - t))``.
    """
    g = jax.nn.sigmoid(z)
    slots = g + g * (1 - g)
    if kind == "window":
        n = z.shape[-1]
        held = jnp.minimum(1.0, window / (n - jnp.arange(n)))
        slots = held + (1 - held) * slots
    return jnp.mean(slots)


def kept(z: Float[Array, "L B K T"], window: int, tau: float | Array) -> tuple[Array, Array]:
    """Share of the tokens outside the last window that gates keep: (mean gate, share of gates >= tau)."""
    g = jax.nn.sigmoid(z[..., : max(1, z.shape[-1] - window)])
    return jnp.mean(g), jnp.mean(g >= tau)


def stack(layers: list[Params]) -> Params:
    """Trained leaves of the layers as the scan takes them, [L, ...]."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def check_model(spec: ModelSpec, tensor: int) -> None:
    """Refuses what the walk does not do.

    Raises:
      ValueError: sliding layers, or KV heads that do not divide over the mesh.
    """
    if any(window is not None for window in spec.windows):
        raise ValueError(
            f"gates for a {spec.family} with sliding-window layers: such a layer is a ring already and takes "
            "no admission. Choose a model whose layers all attend fully."
        )
    if spec.num_kv_heads % tensor:
        raise ValueError(
            f"mesh: {{tensor: {tensor}}} does not divide the model's {spec.num_kv_heads} KV heads. Make "
            "tensor a divisor of them."
        )
