"""Softmax statistics of masked scores, in float32 and without a NaN in any corner.

A partial under construction is ``(m, l, o)``: running max, denominator, numerator. The max of
nothing is taken as 0 wherever it is subtracted, so that no (-inf) - (-inf) is ever formed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EMPTY = -1
"""The id of no page, the position of no token."""


def finite(m: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """m with -inf, the max of nothing, replaced by 0."""
    return jnp.where(m > -jnp.inf, m, 0.0)


def row_max(scores: Float[Array, "... S"], visible: Bool[Array, "... S"]) -> Float[Array, " ..."]:
    """Max over the visible scores, -inf where there are none. A mere shift: not differentiated."""
    return jnp.max(jax.lax.stop_gradient(scores), axis=-1, where=visible, initial=-jnp.inf)


def weigh(
    scores: Float[Array, "... S"], visible: Bool[Array, "... S"], m: Float[Array, " ..."]
) -> Float[Array, "... S"]:
    """exp(scores - m) where visible, exactly 0 elsewhere, whatever the hidden scores are."""
    return jnp.exp(jnp.where(visible, scores - finite(m)[..., None], -jnp.inf))


def finish(
    m: Float[Array, " ..."], l: Float[Array, " ..."], o: Float[Array, "... H"]
) -> tuple[Float[Array, "... H"], Float[Array, " ..."]]:
    """(m, l, o) to the normalised partial (out, lse)."""
    some = l > 0
    l = jnp.where(some, l, 1.0)
    return jnp.where(some[..., None], o / l[..., None], 0.0), jnp.where(
        some, finite(m) + jnp.log(l), -jnp.inf
    )
