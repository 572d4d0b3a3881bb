"""Tile mathematics of blockwise: forward, both halves of backward, column mass; for TPU and GPU bodies.

Positions and statistics come as columns (or equal lanes) for the side that is rows of the tile, as rows for
the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.blockwise.sight import Sight

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Seen(NamedTuple):
    """Positions of a tile's queries and keys, and admission of its keys; columns or rows."""

    q_pos: Int[Array, " ..."]
    k_pos: Int[Array, " ..."]
    admit: Int[Array, " ..."] | None


class Side(NamedTuple):
    """What the backward pass knows of a block of queries."""

    q: Float[Array, "R H"]
    up: Float[Array, "R H"]
    lse: Float[Array, " ..."]
    delta: Float[Array, " ..."]


def _visible(sight: Sight, seen: Seen, s: Array) -> Bool[Array, " ..."]:
    return tiles.sees(seen.q_pos, seen.k_pos, sight.window, seen.admit, s.shape[1])


def _scores(sight: Sight, a: Array, b: Array) -> Array:
    return tiles.cap(tiles.product_nt(a, b) * sight.scale, sight.softcap)


def forward(sight: Sight, q: Array, k: Array, v: Array, seen: Seen | None, stats: tiles.Stats) -> tiles.Stats:
    """Statistics after one more block of keys; tile [R, S]. ``seen`` None: all queries see all keys."""
    mix = lambda p: tiles.product_nn(p.astype(v.dtype), v)  # noqa: E731
    s = _scores(sight, q, k)
    return tiles.grow(stats, s, None if seen is None else _visible(sight, seen, s), mix)


def key_gradient(
    sight: Sight, k: Array, v: Array, side: Side, seen: Seen, dk: Array, dv: Array
) -> tuple[Float[Array, "S H"], Float[Array, "S H"]]:
    """(dk, dv) after one more block of queries; tile [S, R], so that nothing is transposed."""
    s = _scores(sight, k, side.q)
    p = tiles.probabilities(s, _visible(sight, seen, s), side.lse)
    dv = dv + tiles.product_nn(p.astype(side.up.dtype), side.up)
    dp = tiles.product_nt(v, side.up)
    ds = tiles.score_gradient(p, dp, side.delta, s, sight.scale, sight.softcap)
    return dk + tiles.product_nn(ds.astype(side.q.dtype), side.q), dv


def query_gradient(sight: Sight, k: Array, v: Array, side: Side, seen: Seen, dq: Array) -> Array:
    """dq after one more block of keys; tile [R, S]."""
    s = _scores(sight, side.q, k)
    p = tiles.probabilities(s, _visible(sight, seen, s), side.lse)
    dp = tiles.product_nt(side.up, v)
    ds = tiles.score_gradient(p, dp, side.delta, s, sight.scale, sight.softcap)
    return dq + tiles.product_nn(ds.astype(k.dtype), k)


def mass(
    sight: Sight, q: Array, k: Array, lse: Array, weights: Array, seen: Seen, total: Float[Array, "S 1"]
) -> Float[Array, "S 1"]:
    """Weighted attention of a block of keys after one more block of queries; tile [S, R]."""
    s = _scores(sight, k, q)
    p = tiles.probabilities(s, _visible(sight, seen, s), lse)
    return total + jnp.sum(p * weights, axis=1, keepdims=True)
