"""Tile mathematics of attention as pure functions on values, shared by the TPU and the GPU bodies.

A body moves data; everything it computes is here. Statistics are 2-D, a column ``[R, 1]`` (on TPU several
equal ones) for tiles with queries as rows, a row ``[1, R]`` for tiles with keys as rows: all functions
broadcast, so the backward pass may use either. Only operations that both Mosaic and Triton lower are used:
products of 2-D tiles, elementwise operations, reductions of one axis. Hidden scores are a finite number, so
that no (-inf) - (-inf) is ever formed; a NaN that is not hidden reaches the denominator and with it the
whole row, even where a machine's max drops it. Softmax costs a TPU more than its products do: whatever can
be done to a column or a row is not done to a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import products

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num

HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""The score of what may not be seen, and the max of nothing."""

Stats = tuple["Float[Array, 'R W']", "Float[Array, 'R W']", "Float[Array, 'R H']"]
"""(m, l, o): running max, denominator, numerator. W is 1, or a number of equal lanes (``spread``)."""


def product_nt(a: Float[Array, "R H"], b: Float[Array, "S H"]) -> Float[Array, "R S"]:
    """a times b transposed, float32 sums; float32 operands are not rounded."""
    return _product(a, b, 1)


def product_nn(a: Float[Array, "R S"], b: Float[Array, "S H"]) -> Float[Array, "R H"]:
    """a times b, float32 sums; float32 operands are not rounded."""
    return _product(a, b, 0)


def _product(a: Array, b: Array, axis: int) -> Array:
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=products.precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def cap(s: Float[Array, "R S"], limit: float | None) -> Float[Array, "R S"]:
    """limit * tanh(s / limit), written with exp alone (Triton has no tanh in every version)."""
    if limit is None:
        return s
    # Of |x|: e is at most 1, so nothing overflows; (1 - e) / (1 + e) is tanh |x|.
    e = jnp.exp(-2.0 * jnp.abs(s) / limit)
    bounded = limit * (1.0 - e) / (1.0 + e)
    return jnp.where(s < 0, -bounded, bounded)


def sees(
    q_pos: Int[Array, " ..."],
    k_pos: Int[Array, " ..."],
    window: int | None,
    admit: Array | None,
    width: int,
) -> Bool[Array, "R S"]:
    """Which key each query sees, in a tile so wide. Negative positions are padding.

    Positions are a column (or equal lanes) and a row, in either order; ``admit`` is as those of keys.
    """
    # Padded keys lie after everything, padded queries before: one comparison a score instead of three.
    k_pos = spread(jnp.where(k_pos >= 0, k_pos, jnp.iinfo(jnp.int32).max), width)
    q_pos = spread(q_pos, width)
    see = k_pos <= q_pos
    if window is None:
        return see
    near = q_pos - k_pos < window
    return see & (near if admit is None else near | (spread(admit, width) != 0))


def spread(x: Num[Array, "R W"], n: int) -> Num[Array, "R N"]:
    """Equal lanes, n of them; a column stays one, and broadcasts.

    A TPU sends a column through its cross-lane unit row by row to broadcast it; lanes that are equal
    already lie side by side for nothing.
    """
    width = x.shape[1]
    if width == 1 or width == n:
        return x
    return x[:, :n] if n < width else jnp.concatenate([x] * -(-n // width), axis=1)[:, :n]


def start(rows: int, h: int) -> Stats:
    """The statistics of nothing."""
    return (
        jnp.full((rows, 1), HIDDEN, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, h), jnp.float32),
    )


def grow(
    stats: Stats, s: Float[Array, "R S"], visible: Bool[Array, "R S"] | None, mix: Callable[[Array], Array]
) -> Stats:
    """The statistics after one more tile of scores, whose weights ``mix`` turns into an output.

    Where all of it is seen, None, nothing is compared or selected. The numerator may be several arrays, of a
    part of the channels each.
    """
    m, l, o = stats
    s = s if visible is None else jnp.where(visible, s, HIDDEN)
    new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
    # Of nothing, the max is subtracted as 0: exp of HIDDEN is 0, and no weight needs a mask of its own.
    shift = new if visible is None else jnp.where(new > HIDDEN, new, 0.0)
    p = jnp.exp(s - spread(shift, s.shape[1]))
    keep = jnp.exp(m - shift)
    total = keep * l + jnp.sum(p, axis=1, keepdims=True)
    kept = jax.tree.map(lambda o: spread(keep, o.shape[1]) * o, o)
    return new, total, jax.tree.map(jnp.add, kept, mix(p))


def finish(stats: Stats) -> tuple[Float[Array, "R H"], Float[Array, "R W"]]:
    """The normalised partial (out, lse); (0, -inf) of nothing."""
    m, l, o = stats
    some, width = l != 0, o.shape[1]  # NaN is something
    there = some if l.shape[1] in (1, width) else spread(l, width) != 0
    l = jnp.where(some, l, 1.0)
    return jnp.where(there, o / spread(l, width), 0.0), jnp.where(some, m + jnp.log(l), -jnp.inf)


def probabilities(
    s: Float[Array, "R S"], visible: Bool[Array, "R S"], lse: Float[Array, " ..."]
) -> Float[Array, "R S"]:
    """exp(s - lse) of visible scores, 0 of hidden ones and of queries that saw nothing at all."""
    # A query that saw nothing weighs nothing, even what is visible in a part it was not given.
    shift = spread(jnp.where(lse <= HIDDEN, -HIDDEN, lse), s.shape[1])
    return jnp.exp(jnp.where(visible, s - shift, HIDDEN))


def score_gradient(
    p: Float[Array, "R S"],
    dp: Float[Array, "R S"],
    delta: Float[Array, " ..."],
    s: Float[Array, "R S"],
    scale: float,
    softcap: float | None,
) -> Float[Array, "R S"]:
    """Gradient with respect to q times k, from that of the weights (dp) and capped scores s.

    ``delta`` is sum(out * dout) - dlse of each query. Hidden places give 0 whatever dp holds there.
    """
    bend = scale if softcap is None else scale * (1.0 - (s / softcap) * (s / softcap))
    return jnp.where(p != 0, p * (dp - spread(delta, p.shape[1])) * bend, 0.0)
