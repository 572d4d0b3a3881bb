"""The gradient of gated, around any implementation's two passes.

A forward pass returns (out, lse). A backward pass computes the scores of a block again and needs of the
rest only lse and delta: with p the attention and dp = d_out v the gradient of p, that of a biased score is
ds = p (dp - delta), where delta = out . d_out - d_lse carries both outputs' cotangents. Then

  dq = scale ds k,  dk = scale ds^T q,  dv = p^T d_out,  d log_gate = column sums of ds outside the window,

summed over the query heads of a KV head (METHODS: WG-KV). A soft cap multiplies ds by 1 - tanh^2 in dq
and dk; the bias is added after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class Rule(NamedTuple):
    """What is static in a call.

    Attributes:
      window: number of latest positions without a bias.
      scale: of the scores.
      softcap: bound of the scaled scores, or None.
      blocks: queries and keys of a tile; None for what the implementation thinks best.
      interpret: how to run a Pallas body.
    """

    window: int
    scale: float
    softcap: float | None
    blocks: tuple[int, int] | None = None
    interpret: Any = False


def _without_padding(x: Array, lengths: Int[Array, " B"] | None) -> Array:
    """x [B, N, T, ...] with zeros past each row's end, whatever stands there."""
    if lengths is None:
        return x
    there = (jnp.arange(x.shape[2]) < lengths[:, None])[:, None]
    return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 3)), x, jnp.zeros((), x.dtype))


def differentiable(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., tuple[Array, ...]]
) -> Callable[..., tuple[Array, Array]]:
    """The jitted operation made of two passes that know nothing of padding's contents.

    Args:
      forward: ``(q, k, v, log_gate, lengths, rule)`` to ``(out, lse)``, both float32.
      backward: ``(q, k, v, log_gate, lengths, lse, delta, d_out, rule)`` to float32 gradients of q, k, v
        and log_gate; d_out and delta are zero where a query saw nothing.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
    def run(
        q: Array, k: Array, v: Array, log_gate: Array, lengths: Array | None, rule: Rule
    ) -> tuple[Array, Array]:
        return forward(q, k, v, log_gate, lengths, rule)

    def run_forward(
        q: Array, k: Array, v: Array, log_gate: Array, lengths: Array | None, rule: Rule
    ) -> tuple[tuple[Array, Array], tuple[Array | None, ...]]:
        out, lse = forward(q, k, v, log_gate, lengths, rule)
        return (out, lse), (q, k, v, log_gate, lengths, out, lse)

    def run_backward(
        rule: Rule, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
    ) -> tuple[Array | None, ...]:
        q, k, v, log_gate, lengths, out, lse = saved
        some = lse > -jnp.inf
        d_out = jnp.where(some[..., None], cotangents[0], 0.0)
        delta = jnp.sum(out * d_out, axis=-1) - jnp.where(some, cotangents[1], 0.0)
        grads = backward(q, k, v, log_gate, lengths, lse, delta, d_out, rule)
        return *(g.astype(x.dtype) for g, x in zip(grads, saved)), None

    run.defvjp(run_forward, run_backward)

    @functools.partial(jax.jit, static_argnames=("window", "scale", "softcap", "blocks", "interpret"))
    def gated(
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        log_gate: Float[Array, "B K T"],
        lengths: Int[Array, " B"] | None,
        *,
        window: int,
        scale: float,
        softcap: float | None = None,
        blocks: tuple[int, int] | None = None,
        interpret: Any = False,
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
        """See ``api.gated`` and ``Rule``."""
        q, k, v, log_gate = (_without_padding(x, lengths) for x in (q, k, v, log_gate))
        return run(q, k, v, log_gate, lengths, Rule(window, scale, softcap, blocks, interpret))

    return gated
