"""phi by definition (METHODS: Top-K retrieval with φ completion), everything in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EXACT = jax.lax.Precision.HIGHEST


class Summary(NamedTuple):
    """The tokens of each KV head, seen through F positive features; everything float32.

    The shift makes it stable: no feature's largest token ever leaves the range of float32. Nothing
    absorbed is ``(-inf, 0, 0)``.

    Attributes:
      shift: m, the largest log feature of any token absorbed.
      weight: u, the sum of exp(log feature - m).
      values: T, the same sum with every term times its token's value.
    """

    shift: Float[Array, "B K F"]
    weight: Float[Array, "B K F"]
    values: Float[Array, "B K F H"]


def sums(
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    there: Bool[Array, "B K S"],
    shift: Float[Array, "B K F"],
) -> tuple[Float[Array, "B K F"], Float[Array, "B K F H"]]:
    """The sums over tokens of exp(log_k - shift) and of the same times v; float32."""
    a = softmax.hide(log_k.astype(jnp.float32), there[..., None])
    e = jnp.exp(a - softmax.finite(shift)[..., None, :])
    v = jnp.where(there[..., None], v.astype(jnp.float32), 0.0)
    return jnp.sum(e, axis=-2), jnp.einsum("bksf,bksh->bkfh", e, v, precision=EXACT)


def summing(
    sums: Callable[..., tuple[Array, Array]], *options: str
) -> tuple[Callable[..., Summary], Callable[..., Summary]]:
    """``api.phi_build`` and ``api.phi_subtract`` with these sums; their ``options`` are static keywords."""

    @functools.partial(jax.jit, static_argnames=options)
    def build(
        log_k: Float[Array, "B K S F"],
        v: Float[Array, "B K S H"],
        there: Bool[Array, "B K S"],
        onto: Summary | None,
        **more: Any,
    ) -> Summary:
        """See ``api.phi_build``."""
        hidden = softmax.hide(jax.lax.stop_gradient(log_k).astype(jnp.float32), there[..., None])
        shift = jnp.max(hidden, axis=-2, initial=-jnp.inf)
        if onto is None:
            return Summary(shift, *sums(log_k, v, there, shift, **more))
        shift = jnp.maximum(shift, onto.shift)
        weight, values = sums(log_k, v, there, shift, **more)
        keep = jnp.exp(onto.shift - softmax.finite(shift))
        return Summary(shift, weight + keep * onto.weight, values + keep[..., None] * onto.values)

    @functools.partial(jax.jit, static_argnames=("floor", *options))
    def subtract(
        summary: Summary,
        log_k: Float[Array, "B K S F"],
        v: Float[Array, "B K S H"],
        there: Bool[Array, "B K S"],
        *,
        floor: float,
        **more: Any,
    ) -> Summary:
        """See ``api.phi_subtract``."""
        weight, values = sums(log_k, v, there, summary.shift, **more)
        rest = jnp.maximum(summary.weight - weight, floor * summary.weight)
        return Summary(summary.shift, rest, summary.values - values)

    return build, subtract


build, subtract = summing(sums)


@jax.jit
def evaluate(
    summary: Summary, log_q: Float[Array, "B N T F"]
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.phi_evaluate``."""
    b, n, t, f = log_q.shape
    heads, h = summary.shift.shape[1], summary.values.shape[-1]
    some = summary.weight != 0
    u = jnp.where(some, summary.weight, 1.0)
    amount = jnp.where(some, softmax.finite(summary.shift) + jnp.log(u), -jnp.inf)
    a = log_q.astype(jnp.float32).reshape(b, heads, n // heads, t, f) + amount[:, :, None, None, :]
    m = softmax.row_max(a)
    p = softmax.query_weights(a, m)
    o = jnp.einsum("bkgtf,bkfh->bkgth", p, summary.values / u[..., None], precision=EXACT)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(b, n, t, h), lse.reshape(b, n, t)
