"""The gradient of blockwise, whatever runs it: recomputed from lse block by block, no [T, S] array.

With delta = sum(out * dout) - dlse of each query, the gradient of a score is p (dp - delta). ``ref``
needs none of this: JAX differentiates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.sight import Above, Partial, Sight, Where

if TYPE_CHECKING:
    from jaxtyping import Array

Run = Callable[..., Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def differentiable(
    run: Run, backward: Run, sight: Sight, q: Array, k: Array, v: Array, where: Where
) -> Partial:
    """``run(q, k, v, where, sight=sight)`` with ``backward`` as its reverse mode."""
    return run(q, k, v, where, sight=sight)


def _forward(run: Run, backward: Run, sight: Sight, q: Array, k: Array, v: Array, where: Where) -> Any:
    out, lse = differentiable(run, backward, sight, q, k, v, where)
    return (out, lse), (q, k, v, where, out, lse)


def _backward(run: Run, backward: Run, sight: Sight, saved: Any, up: Partial) -> Any:
    return *gradients(backward, sight, saved, up), None


def gradients(backward: Run, sight: Sight, saved: Any, up: Partial) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of a read: ``saved`` is (q, k, v, where, out, lse), ``up`` the gradient of (out, lse)."""
    q, k, v, where, out, lse = saved
    out, up = out.astype(jnp.float32), (up[0].astype(jnp.float32), up[1])
    where = where.within_reach(sight.window)
    there = (
        lse != -jnp.inf
    )  # a query that saw nothing depends on nothing, whatever it holds and comes from above
    delta = jnp.where(there, jnp.sum(out * up[0], axis=-1) - up[1], 0.0)
    above = Above(_kept(up[0], there), lse, delta)
    keys = (where.k_pos >= 0)[:, None]
    grads = backward(_kept(q, there), _kept(k, keys), _kept(v, keys), where, above, sight=sight)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v)))


def _kept(x: Array, there: Array) -> Array:
    """x [..., H] with zeros where not there: 0 times NaN is NaN."""
    return jnp.where(there[..., None], x, jnp.zeros((), x.dtype))


differentiable.defvjp(_forward, _backward)
