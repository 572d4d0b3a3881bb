"""The gradient of blockwise, whatever runs it: recomputed from lse block by block, no [T, S] array.

With delta = sum(out * dout) - dlse of each query, the gradient of a score is p (dp - delta). ``ref``
needs none of this, and ``xla`` only where it goes block by block: JAX differentiates the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array


class Options(NamedTuple):
    """What a call is compiled for."""

    window: int | None
    scale: float
    softcap: float | None


class Where(NamedTuple):
    """What is not differentiated."""

    q_pos: Array
    k_pos: Array
    admit: Array | None


Run = Callable[..., Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def differentiable(
    run: Run, backward: Run, options: Options, q: Array, k: Array, v: Array, where: Where
) -> tuple[Array, Array]:
    """``run(q, k, v, *where, **options)`` with ``backward`` as its reverse mode."""
    del backward
    return run(q, k, v, *where, **options._asdict())


def _forward(run: Run, backward: Run, options: Options, q: Array, k: Array, v: Array, where: Where) -> Any:
    out, lse = differentiable(run, backward, options, q, k, v, where)
    return (out, lse), (q, k, v, where, out, lse)


def _backward(run: Run, backward: Run, options: Options, saved: Any, up: tuple[Array, Array]) -> Any:
    del run
    q, k, v, where, out, lse = saved
    up_out, up_lse = up
    there = lse > -jnp.inf  # a query that saw nothing depends on nothing, whatever comes from above
    delta = jnp.where(there, jnp.sum(out * up_out, axis=-1) - up_lse, 0.0)
    up_out = jnp.where(there[..., None], up_out, 0.0)
    padding = (where.k_pos >= 0)[:, None, :, None]
    clean_k, clean_v = (jnp.where(padding, x, jnp.zeros((), x.dtype)) for x in (k, v))
    grads = backward(q, clean_k, clean_v, *where, lse, delta, up_out, **options._asdict())
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v))), None


differentiable.defvjp(_forward, _backward)
