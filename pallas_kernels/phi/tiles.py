"""Tiles of phi as pure functions on values (see ``pallas_kernels.tiles``); shifts and weights are rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import tiles

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def sums(
    log_k: Array, v: Array, there: Bool[Array, "S 1"], shift: Float[Array, "1 F"]
) -> tuple[Float[Array, "1 F"], Float[Array, "F H"]]:
    """The sums over a tile of tokens of exp(log_k - shift), and of the same times v; float32."""
    a = jnp.where(there, log_k.astype(jnp.float32) - shift, tiles.HIDDEN)
    e = jnp.where(there, jnp.exp(a), 0.0)
    v = jnp.where(there, v.astype(jnp.float32), 0.0)
    values = jax.lax.dot_general(
        e,
        v,
        (((0,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(e, axis=0, keepdims=True), values


def evaluated(
    log_q: Array, shift: Float[Array, "1 F"], weight: Float[Array, "1 F"], values: Float[Array, "F H"]
) -> tuple[Float[Array, "R H"], Float[Array, "R 1"]]:
    """(out, lse) of a tile of queries; features that hold nothing have weight 0 and any finite shift."""
    some = weight != 0
    u = jnp.where(some, weight, 1.0)
    a = log_q.astype(jnp.float32) + shift + jnp.log(u)
    # -inf in log_q is the feature 0: hidden like one that holds nothing.
    see = some & ~(a <= tiles.HIDDEN)
    rows, h = log_q.shape[0], values.shape[1]
    top = jnp.full((rows, 1), tiles.HIDDEN, jnp.float32)
    stats = top, jnp.zeros((rows, 1), jnp.float32), jnp.zeros((rows, h), jnp.float32)
    return tiles.finish(tiles.grow(stats, a, see, lambda p: tiles.product_nn(p / u, values)))
