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
from pallas_kernels.blockwise import cut, grad, plan, xla_grad
from pallas_kernels.blockwise.cut import BLOCK_K, BLOCK_Q
from pallas_kernels.blockwise.ref import visible

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from pallas_kernels.blockwise.sight import Partial, Sight, Where

DENSE_T = 8
"""Up to this many queries one dense block is taken whatever S is: it is as small as K and V."""


def _scores(
    q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], sight: Sight
) -> Float[Array, "B K G T S"]:
    """Scores of every query and key, whether the query sees it or not."""
    b, heads, g, t, h = q.shape
    s = products.scores(q.reshape(b, heads, g * t, h), k, sight.scale).reshape(b, heads, g, t, -1)
    return softmax.cap(s, sight.softcap)


def _visible_scores(q: Array, k: Array, where: Where, sight: Sight) -> Float[Array, "B K G T S"]:
    """Scores, -inf where hidden."""
    return softmax.hide(_scores(q, k, sight), visible(where, sight.window))


def _in_one(t: int, s: int) -> bool:
    return t <= DENSE_T or t * s <= BLOCK_Q * BLOCK_K


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


def _dense(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    s = _visible_scores(cut.grouped(q, k), k, where, sight)
    m = softmax.row_max(s)
    p = softmax.weigh(s, m)
    # Masking V copies all of V, so it is done only where 0 * NaN of a padded value shows.
    o = _mix(p, v)
    o = jax.lax.cond(jnp.isnan(o).any(), lambda: _mix_slowly(p, v, where.k_pos), lambda: o)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


@functools.partial(jax.jit, static_argnames="sight")
def blockwise(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    """See ``api.blockwise``."""
    run = _dense if _in_one(q.shape[2], k.shape[2]) else _blocked
    return grad.differentiable(run, xla_grad.backward, sight, q, k, v, where.within_reach(sight.window))


def _blocked(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    x = cut.both(cut.grouped(q, k), k, where)
    vs = cut.blocks(v, 2, x.k.shape[3], 0)
    order, count = cut.listed(x.pairs(sight.window))

    def query_block(y: tuple[Array, ...]) -> tuple[Array, Array]:
        q_i, pos_i, order_i, count_i = y

        def key_block(c: Int[Array, ""], mlo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            j = order_i[c]
            s = _visible_scores(q_i, x.k[j], x.where(pos_i, j), sight)
            return softmax.grow(*mlo, s, lambda p: _mix(p, _without_padding(vs[j], x.k_pos[j][:, None])))

        row = q_i.shape[:-1]
        start = (
            jnp.full(row, -jnp.inf, jnp.float32),
            jnp.zeros(row, jnp.float32),
            jnp.zeros(q_i.shape, jnp.float32),
        )
        return softmax.finish(*jax.lax.fori_loop(0, count_i, key_block, start))

    out, lse = jax.lax.map(query_block, (x.q, x.q_pos, order, count))
    t = q.shape[2]
    return cut.joined(out, 3, t).reshape(q.shape), cut.joined(lse, 3, t).reshape(q.shape[:3])


@functools.partial(jax.jit, static_argnames="sight")
def column_mass(
    q: Array, k: Array, lse: Array, weights: Array, where: Where, *, sight: Sight
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    (b, n, t, _), s = q.shape, k.shape[2]
    grouped = cut.grouped(q, k)
    lse = lse.reshape(grouped.shape[:-1])
    where = plan.weighed(where, weights).within_reach(sight.window)
    if _in_one(t, s):
        return _mass(grouped, k, lse, weights, where, sight).reshape(b, n, s)
    x = cut.both(grouped, k, where)
    bq, bk = x.q.shape[4], x.k.shape[3]
    lses, weightss = cut.blocks(lse, 3, bq, 0.0), cut.blocks(weights, 1, bq, 0.0)
    order, count = cut.listed(x.pairs(sight.window).T)

    def key_block(y: tuple[Array, ...]) -> Float[Array, "B K G S"]:
        j, order_j, count_j = y

        def query_block(c: Int[Array, ""], total: Float[Array, "B K G S"]) -> Float[Array, "B K G S"]:
            i = order_j[c]
            return total + _mass(x.q[i], x.k[j], lses[i], weightss[i], x.where(x.q_pos[i], j), sight)

        return jax.lax.fori_loop(0, count_j, query_block, jnp.zeros((*lse.shape[:3], bk), jnp.float32))

    mass = jax.lax.map(key_block, (jnp.arange(x.k.shape[0]), order, count))
    return cut.joined(mass, 3, s).reshape(b, n, s)


def _mass(
    q: Float[Array, "B K G T H"], k: Array, lse: Array, weights: Array, where: Where, sight: Sight
) -> Float[Array, "B K G S"]:
    p = softmax.probabilities(_scores(q, k, sight), visible(where, sight.window), lse)
    return jnp.einsum("bkgts,bt->bkgs", p, weights, precision=jax.lax.Precision.HIGHEST)
