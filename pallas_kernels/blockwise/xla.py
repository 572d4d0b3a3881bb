"""blockwise and column_mass in plain XLA: one dense block when small, blocks of both axes when not.

The blocked form asks, from positions alone, which (query block, key block) pairs see each other
at all, and loops over just those, in whatever order positions lie.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.blockwise import cut, grad, xla_grad
from pallas_kernels.blockwise.ref import visible

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

BLOCK_Q = 256
BLOCK_K = 512
DENSE_T = 8
"""Up to this many queries one dense block is taken whatever S is: it is as small as K and V."""


def _scores(
    q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], scale: float, softcap: float | None
) -> Float[Array, "B K G T S"]:
    b, heads, g, t, h = q.shape
    s = products.scores(q.reshape(b, heads, g * t, h), k, scale).reshape(b, heads, g, t, -1)
    return softmax.cap(s, softcap)


def _mix(p: Float[Array, "B K G T S"], v: Float[Array, "B K S H"]) -> Float[Array, "B K G T H"]:
    b, heads, g, t, s = p.shape
    return products.mix(p.reshape(b, heads, g * t, s), v).reshape(b, heads, g, t, -1)


def _without_padding(v: Float[Array, "... S H"], k_pos: Int[Array, "... S"]) -> Float[Array, "... S H"]:
    return jnp.where((k_pos >= 0)[..., None], v, jnp.zeros((), v.dtype))


def _mix_slowly(
    p: Float[Array, "B K G T S"], v: Float[Array, "B K S H"], k_pos: Int[Array, "B S"]
) -> Float[Array, "B K G T H"]:
    """``_mix`` whatever padded values hold."""
    b, heads, g, t, s = p.shape
    there = jnp.repeat(k_pos >= 0, heads, axis=0)
    o = products.mix_only(p.reshape(b * heads, g * t, s), v.reshape(b * heads, s, -1), there)
    return o.reshape(b, heads, g, t, -1)


def _dense(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    see: Bool[Array, "... T S"],
    k_pos: Int[Array, "B S"],
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K G T"]]:
    s = softmax.hide(_scores(q, k, scale, softcap), see)
    m = softmax.row_max(s)
    p = softmax.weigh(s, m)
    # Masking V copies all of V, so it is done only where 0 * NaN of a padded value shows.
    o = _mix(p, v)
    o = jax.lax.cond(jnp.isnan(o).any(), lambda: _mix_slowly(p, v, k_pos), lambda: o)
    return softmax.finish(m, jnp.sum(p, axis=-1), o)


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def blockwise(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.blockwise``."""
    b, n, t, h = q.shape
    if t <= DENSE_T or t * k.shape[2] <= BLOCK_Q * BLOCK_K:
        see = visible(q_pos, k_pos, window, admit)
        out, lse = _dense(cut.grouped(q, k), k, v, see, k_pos, scale, softcap)
        return out.reshape(b, n, t, h), lse.reshape(b, n, t)
    options, where = grad.Options(window, scale, softcap), grad.Where(q_pos, k_pos, admit)
    return grad.differentiable(_blocked, xla_grad.backward, options, q, k, v, where)


def _blocked(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    whole, q = q.shape, cut.grouped(q, k)
    t, bq, bk = q.shape[3], min(BLOCK_Q, q.shape[3]), min(BLOCK_K, k.shape[2])
    qs, q_poss = cut.blocks(q, 3, bq, 0), cut.blocks(q_pos, 1, bq, softmax.EMPTY)
    ks, vs, k_poss = cut.blocks(k, 2, bk, 0), cut.blocks(v, 2, bk, 0), cut.blocks(k_pos, 1, bk, softmax.EMPTY)
    admits = None if admit is None else cut.blocks(admit, 2, bk, False)
    order, count = cut.listed(cut.block_pairs(q_poss, k_poss, admits, window))

    def query_block(x: tuple[Array, ...]) -> tuple[Array, Array]:
        q_i, pos_i, order_i, count_i = x

        def key_block(c: Int[Array, ""], mlo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            j = order_i[c]
            see = visible(pos_i, k_poss[j], window, cut.at(admits, j))
            s = softmax.hide(_scores(q_i, ks[j], scale, softcap), see)
            return softmax.grow(*mlo, s, lambda p: _mix(p, _without_padding(vs[j], k_poss[j][:, None])))

        row = q_i.shape[:-1]
        start = (
            jnp.full(row, -jnp.inf, jnp.float32),
            jnp.zeros(row, jnp.float32),
            jnp.zeros(q_i.shape, jnp.float32),
        )
        return softmax.finish(*jax.lax.fori_loop(0, count_i, key_block, start))

    out, lse = jax.lax.map(query_block, (qs, q_poss, order, count))
    return cut.joined(out, 3, t).reshape(whole), cut.joined(lse, 3, t).reshape(whole[:3])


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap"))
def column_mass(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    b, n, t, _ = q.shape
    s = k.shape[2]
    grouped = cut.grouped(q, k)
    lse = lse.reshape(grouped.shape[:-1])
    # A query of weight 0 is the same as padding, and padded blocks are skipped.
    q_pos = jnp.where(weights != 0, q_pos, softmax.EMPTY)
    if t <= DENSE_T or t * s <= BLOCK_Q * BLOCK_K:
        see = visible(q_pos, k_pos, window, admit)
        return _mass(grouped, k, lse, weights, see, scale, softcap).reshape(b, n, s)
    bq, bk = min(BLOCK_Q, t), min(BLOCK_K, s)
    qs, q_poss = cut.blocks(grouped, 3, bq, 0), cut.blocks(q_pos, 1, bq, softmax.EMPTY)
    lses, weightss = cut.blocks(lse, 3, bq, 0.0), cut.blocks(weights, 1, bq, 0.0)
    ks, k_poss = cut.blocks(k, 2, bk, 0), cut.blocks(k_pos, 1, bk, softmax.EMPTY)
    admits = None if admit is None else cut.blocks(admit, 2, bk, False)
    order, count = cut.listed(cut.block_pairs(q_poss, k_poss, admits, window).T)

    def key_block(x: tuple[Array, ...]) -> Float[Array, "B K G S"]:
        j, order_j, count_j = x
        k_j, pos_j, admit_j = ks[j], k_poss[j], cut.at(admits, j)

        def query_block(c: Int[Array, ""], total: Float[Array, "B K G S"]) -> Float[Array, "B K G S"]:
            i = order_j[c]
            see = visible(q_poss[i], pos_j, window, admit_j)
            return total + _mass(qs[i], k_j, lses[i], weightss[i], see, scale, softcap)

        return jax.lax.fori_loop(0, count_j, query_block, jnp.zeros((*lse.shape[:3], bk), jnp.float32))

    mass = jax.lax.map(key_block, (jnp.arange(ks.shape[0]), order, count))
    return cut.joined(mass, 3, s).reshape(b, n, s)


def _mass(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B K G T"],
    weights: Float[Array, "B T"],
    see: Bool[Array, "... T S"],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B K G S"]:
    p = softmax.weigh(softmax.hide(_scores(q, k, scale, softcap), see), lse)
    return jnp.einsum("bkgts,bt->bkgs", p, weights, precision=jax.lax.Precision.HIGHEST)
