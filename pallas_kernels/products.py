"""The two matrix products of attention, written the way XLA runs them fastest on each platform.

Products run in the dtype of keys and values with float32 sums. Measured on two CPU cores (jax
0.10.2), one read of 2048 pages of 64 slots and head dim 64 by R queries each:

* float32, 2 <= R <= 8: XLA copies K unless K is the left operand (20 ms against 2.4 ms for R = 4; of 1,024
  pages on faster cores 1.9 against 0.6 for R = 3, but 1.9 against 2.4 for R = 15, which turns more scores).
  The barrier keeps the transpose that follows from being folded back into the product.
* bfloat16, R = 1: the matrix-vector path is 7 times slower than the same product for two queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Full float32 products where the operands are float32; the platform's own otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)


def _twice(x: Float[Array, "... R X"]) -> Float[Array, "... 2R X"]:
    return jnp.concatenate([x, x], axis=-2)


def _on_cpu(run: Callable[..., Array], plain: Callable[..., Array], *args: Array) -> Array:
    """``run`` where the program is compiled for a CPU, ``plain`` elsewhere."""
    return jax.lax.platform_dependent(*args, cpu=run, default=plain)


def scores(q: Float[Array, "... R H"], k: Float[Array, "... S H"], scale: float) -> Float[Array, "... R S"]:
    """q times k transposed, scaled; float32."""
    plain, rows, q = functools.partial(_einsum, "...rh,...sh->...rs"), q.shape[-2], q.astype(k.dtype)

    def twice(q: Array, k: Array) -> Array:
        return plain(_twice(q), k)[..., :1, :]

    def keys_first(q: Array, k: Array) -> Array:
        return jnp.swapaxes(jax.lax.optimization_barrier(_einsum("...sh,...rh->...sr", k, q)), -1, -2)

    if rows == 1 and k.dtype == jnp.bfloat16:
        return _on_cpu(twice, plain, q, k) * scale
    if 2 <= rows <= 8 and k.dtype == jnp.float32:
        return _on_cpu(keys_first, plain, q, k) * scale
    return plain(q, k) * scale


def mix(p: Float[Array, "... R S"], v: Float[Array, "... S H"]) -> Float[Array, "... R H"]:
    """p times v; float32. 0 * NaN is NaN: hide what p does not weigh, or look at the result."""
    plain, p = functools.partial(_einsum, "...rs,...sh->...rh"), p.astype(v.dtype)

    def twice(p: Array, v: Array) -> Array:
        return plain(_twice(p), v)[..., :1, :]

    return _on_cpu(twice, plain, p, v) if p.shape[-2] == 1 and v.dtype == jnp.bfloat16 else plain(p, v)


def mix_only(
    p: Float[Array, "X R S"], v: Float[Array, "X S H"], there: Bool[Array, "X S"]
) -> Float[Array, "X R H"]:
    """``mix`` that sees nothing of v where it is not ``there``: one X at a time, slow, little memory.

    A last resort. Masking v for ``mix`` would be faster when needed, but enlarges the temporary memory
    of every call that does not need it (measured: 4 ms of page faults for a v of 33 MB).
    """

    def one(i: Int[Array, ""]) -> Float[Array, "R H"]:
        # Tied to i, v cannot be converted to float32 as a whole before the loop (XLA on CPU would).
        v_loop, i = jax.lax.optimization_barrier((v, i))
        return mix(p[i], jnp.where(there[i][:, None], v_loop[i], jnp.zeros((), v.dtype)))

    return jax.lax.map(one, jnp.arange(v.shape[0]))
