"""Softmax statistics of masked scores, in float32: no corner makes a NaN, and none hides one.

A partial under construction is ``(m, l, o)``: running max, denominator, numerator. The max of
nothing is taken as 0 wherever it is subtracted, so that no (-inf) - (-inf) is ever formed. Nothing is
what equals -inf, or has weight 0: a NaN is something, and the row that it is in ends as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

EMPTY = -1
"""The id of no page, the position of no token."""


def finite(m: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """m with -inf, the max of nothing, replaced by 0."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def cap(scores: Float[Array, "... S"], limit: float | None) -> Float[Array, "... S"]:
    """limit * tanh(scores / limit): a soft bound, before anything is hidden; None: no bound."""
    return scores if limit is None else limit * jnp.tanh(scores / limit)


def hide(scores: Float[Array, "... S"], visible: Bool[Array, "... S"]) -> Float[Array, "... S"]:
    """scores with -inf in place of the hidden ones, whatever those are."""
    return jnp.where(visible, scores, -jnp.inf)


def row_max(scores: Float[Array, "... S"]) -> Float[Array, " ..."]:
    """Max of a row of scores. A mere shift: not differentiated."""
    return jnp.max(jax.lax.stop_gradient(scores), axis=-1)


def query_weights(scores: Float[Array, "... S"], m: Float[Array, " ..."]) -> Float[Array, "... S"]:
    """exp(scores - m), exactly 0 where hidden."""
    return jnp.exp(scores - finite(m)[..., None])


def probabilities(
    scores: Float[Array, "... S"], visible: Bool[Array, "... S"], lse: Float[Array, " ..."]
) -> Float[Array, "... S"]:
    """exp(scores - lse) of the visible, exactly 0 of hidden ones whatever lse is."""
    return jnp.exp(hide(scores - finite(lse)[..., None], visible))


def grow(
    m: Float[Array, " ..."],
    l: Float[Array, " ..."],
    o: Float[Array, "... H"],
    scores: Float[Array, "... S"],
    mix: Callable[[Array], Array],
) -> tuple[Float[Array, " ..."], Float[Array, " ..."], Float[Array, "... H"]]:
    """(m, l, o) after one more block of scores, whose weights ``mix`` turns into an output."""
    new = jnp.maximum(m, row_max(scores))
    p = query_weights(scores, new)
    keep = jnp.exp(m - finite(new))
    return new, l * keep + jnp.sum(p, axis=-1), o * keep[..., None] + mix(p)


def finish(
    m: Float[Array, " ..."], l: Float[Array, " ..."], o: Float[Array, "... H"]
) -> tuple[Float[Array, "... H"], Float[Array, " ..."]]:
    """(m, l, o) to the normalised partial (out, lse)."""
    some = l != 0
    l = jnp.where(some, l, 1.0)
    return jnp.where(some[..., None], o / l[..., None], 0.0), jnp.where(
        some, finite(m) + jnp.log(l), -jnp.inf
    )
