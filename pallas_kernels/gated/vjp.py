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

from pallas_kernels.tuning import Blocks, Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class Rule(NamedTuple):
    """What is static in a call.

    Attributes:
      window: number of latest positions without a bias.
      scale: of the scores.
      softcap: bound of the scaled scores, or None.
      blocks: see ``tuning.pick``; set by the keyword of that name.
      interpret: how to run a Pallas body; likewise.
    """

    window: int
    scale: float
    softcap: float | None
    blocks: Tuned | tuple[int, int] = ()
    interpret: Any = False


class GatedSizes(NamedTuple):
    """Static sizes of a Pallas body: t is a multiple of both blocks; t and h are padded."""

    b: int
    n: int
    heads: int
    t: int
    h: int
    bq: int
    bk: int
    blocks: Blocks
    rule: Rule

    @property
    def nq(self) -> int:
        return self.t // self.bq

    @property
    def nk(self) -> int:
        return self.t // self.bk

    @property
    def group(self) -> int:
        return self.n // self.heads


class Inputs(NamedTuple):
    """Arrays of a call, as in ``api.gated``; whatever stood past rows' ends is zero."""

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    log_gate: Float[Array, "B K T"]
    lengths: Int[Array, " B"] | None

    def ends(self) -> Int[Array, " B"]:
        b, _, t, _ = self.q.shape
        return jnp.full(b, t, jnp.int32) if self.lengths is None else self.lengths.astype(jnp.int32)


class Above(NamedTuple):
    """What a backward pass starts from; d_out and delta are zero where a query saw nothing."""

    d_out: Float[Array, "B N T H"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]


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
      forward: ``(Inputs, rule)`` to ``(out, lse)``, both float32.
      backward: ``(Inputs, Above, rule)`` to float32 gradients of q, k, v and log_gate.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def run(x: Inputs, rule: Rule) -> tuple[Array, Array]:
        return forward(x, rule)

    def run_forward(x: Inputs, rule: Rule) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        out, lse = forward(x, rule)
        return (out, lse), (x, out, lse)

    def run_backward(rule: Rule, saved: tuple[Any, ...], up: tuple[Array, Array]) -> tuple[Inputs]:
        x, out, lse = saved
        some = lse != -jnp.inf
        d_out = jnp.where(some[..., None], up[0], 0.0)
        delta = jnp.sum(out * d_out, axis=-1) - jnp.where(some, up[1], 0.0)
        grads = backward(x, Above(d_out, lse, delta), rule)
        dq, dk, dv, d_gate = (g.astype(y.dtype) for g, y in zip(grads, x))
        return (Inputs(dq, dk, dv, d_gate, None),)

    run.defvjp(run_forward, run_backward)

    @functools.partial(jax.jit, static_argnames=("rule", "interpret", "blocks"))
    def gated(
        q: Array,
        k: Array,
        v: Array,
        log_gate: Array,
        lengths: Array | None,
        *,
        rule: Rule,
        interpret: Any = False,
        blocks: Tuned = (),
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
        """See ``api.gated``."""
        q, k, v, log_gate = (_without_padding(x, lengths) for x in (q, k, v, log_gate))
        return run(
            Inputs(q, k, v, log_gate, lengths),
            rule._replace(interpret=interpret, blocks=blocks or rule.blocks),
        )

    return gated
