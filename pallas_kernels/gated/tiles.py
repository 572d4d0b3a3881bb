"""Tiles of gated, forward and backward, as pure functions on values (see ``pallas_kernels.tiles``).

A tile has queries as rows, its statistics, gate and positions being columns (or equal lanes) of queries and
rows of keys; or it is the other way about, as ``key_gradients`` wants it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.gated.vjp import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Tile(NamedTuple):
    """Where a tile lies: positions of its queries and keys, and the row's length."""

    i: Int[Array, " ..."]
    j: Int[Array, " ..."]
    length: Int[Array, ""]


def by_query(
    first_query: Array, first_key: Array, rows: int, keys: int, length: Array, lanes: int = 1
) -> Tile:
    """A tile with queries as rows; their positions in so many equal lanes."""
    i = first_query + jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 0)
    return Tile(i, first_key + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1), length)


def by_key(first_query: Array, first_key: Array, rows: int, keys: int, length: Array, lanes: int = 1) -> Tile:
    """A tile with keys as rows; their positions in so many equal lanes."""
    i = first_query + jax.lax.broadcasted_iota(jnp.int32, (1, rows), 1)
    return Tile(i, first_key + jax.lax.broadcasted_iota(jnp.int32, (keys, lanes), 0), length)


def scores(
    a: Array, b: Array, gate: Array, place: Tile, rule: Rule
) -> tuple[Float[Array, "R S"], Float[Array, "R S"], Bool[Array, "R S"], Bool[Array, "R S"]]:
    """(capped, biased, visible, biased at all) scores of a times b transposed."""
    capped = tiles.cap(tiles.product_nt(a, b) * rule.scale, rule.softcap)
    i, j = (tiles.spread(x, capped.shape[1]) for x in (place.i, place.j))
    see = (j <= i) & (i < place.length)
    far = i - j >= rule.window
    return capped, capped + jnp.where(far, tiles.spread(gate, capped.shape[1]), 0.0), see, far


def grow(
    stats: tiles.Stats, q: Array, k: Array, v: Array, gate: Array, place: Tile, rule: Rule
) -> tiles.Stats:
    """The forward statistics after one more tile of keys; ``gate`` is a row."""
    _, s, see, _ = scores(q, k, gate, place, rule)
    return tiles.grow(stats, s, see, lambda p: tiles.product_nn(p.astype(v.dtype), v))


def _raw(ds: Array, capped: Array, rule: Rule) -> Array:
    """The gradient of a capped score to that of the product of q and k."""
    return ds * rule.scale if rule.softcap is None else ds * rule.scale * (1.0 - (capped / rule.softcap) ** 2)


def query_gradient(
    q: Array, k: Array, v: Array, gate: Array, d_out: Array, lse: Array, delta: Array, at: Tile, rule: Rule
) -> Float[Array, "R H"]:
    """What one tile of keys adds to dq; gate is [1, S], lse and delta are [R, 1]."""
    capped, s, see, _ = scores(q, k, gate, at, rule)
    p = tiles.probabilities(s, see, lse)
    ds = p * (tiles.product_nt(d_out, v) - tiles.spread(delta, p.shape[1]))
    return tiles.product_nn(_raw(ds, capped, rule).astype(k.dtype), k)


def key_gradients(
    q: Array, k: Array, v: Array, gate: Array, d_out: Array, lse: Array, delta: Array, at: Tile, rule: Rule
) -> tuple[Float[Array, "S H"], Float[Array, "S H"], Float[Array, "S 1"]]:
    """What one tile of queries adds to dk, dv and d log_gate; gate is [S, 1], lse and delta are [1, R]."""
    capped, s, see, far = scores(k, q, gate, at, rule)
    p = tiles.probabilities(s, see, lse)
    ds = p * (tiles.product_nt(v, d_out) - delta)
    d_gate = jnp.sum(jnp.where(far, ds, 0.0), axis=1, keepdims=True)
    dk = tiles.product_nn(_raw(ds, capped, rule).astype(q.dtype), q)
    return dk, tiles.product_nn(p.astype(d_out.dtype), d_out), d_gate
