"""Matrix products of training: bfloat16 in, float32 out, forward and backward.

On a CPU with AMX, XLA hands such a product to a tile kernel (about 1,000 GFLOP/s on one core; a bfloat16
result 130, float32 150), but only where the left operand is contracted over its last axis as it lies in
memory. So the backward pass transposes for real instead of contracting over the first axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float

HALF = jnp.bfloat16


def transposed(x: Array) -> Array:
    """The last two axes swapped, in memory too."""
    y = jnp.swapaxes(x, -1, -2)
    return with_layout_constraint(y, Layout(tuple(range(y.ndim))))


def rows_by_columns(a: BFloat16[Array, "*B N K"], b: BFloat16[Array, "*B K M"]) -> Float[Array, "*B N M"]:
    """a b, float32."""
    return _dot(a, b, b.ndim - 2)


def rows_by_rows(a: BFloat16[Array, "*B N K"], b: BFloat16[Array, "*B M K"]) -> Float[Array, "*B N M"]:
    """a b^T, float32."""
    return _dot(a, b, b.ndim - 1)


def _dot(a: Array, b: Array, over: int) -> Array:
    many = tuple(range(a.ndim - 2))
    sides = (((a.ndim - 1,), (over,)), (many, many))
    if jax.__version_info__ < (0, 8):  # whose CPUs lack this product for some shapes
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # Behind the barrier no transpose is folded into the product: CPUs lack some of those that come of it.
    return jax.lax.optimization_barrier(jax.lax.dot_general(a, b, sides, preferred_element_type=jnp.float32))


@jax.custom_vjp
def product(x: Float[Array, "N K"], w: Float[Array, "K M"]) -> Float[Array, "N M"]:
    """x w of float32 (or bfloat16) arrays, multiplied in bfloat16, summed in float32."""
    return rows_by_columns(x.astype(HALF), w.astype(HALF))


def _forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    a, b = x.astype(HALF), w.astype(HALF)
    kinds = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)
    return rows_by_columns(a, b), (a, b, *kinds)


def _backward(saved: tuple[Array, Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    a, b, x, w = saved
    dy = dy.astype(HALF)
    return rows_by_rows(dy, b).astype(x.dtype), rows_by_columns(transposed(a), dy).astype(w.dtype)


product.defvjp(_forward, _backward)
