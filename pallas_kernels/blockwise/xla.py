"""blockwise and column_mass in plain XLA: one dense block when small, blocks of both axes when not.

The blocked form asks, from positions alone, which (query block, key block) pairs see each other
at all, and loops over just those, in whatever order positions lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.blockwise import block_lists, cut, grad, xla_grad
from pallas_kernels.blockwise.cut import BLOCK_K, BLOCK_Q
from pallas_kernels.blockwise.ref import visible
from pallas_kernels.blockwise.sight import Partial, Sight, Where

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

DENSE_T = 8
"""Up to this many queries one dense block is taken whatever S is: it is as small as K and V."""


def _scores(
    q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], sight: Sight
) -> Float[Array, "B K G T S"]:
    """Scores of every query and key, whether the query sees it or not."""
    b, heads, g, t, h = q.shape
    s = products.scores(q.reshape(b, heads, g * t, h), k, sight.scale).reshape(b, heads, g, t, -1)
    return softmax.cap(s, sight.softcap)


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
    s = softmax.hide(_scores(cut.grouped(q, k), k, sight), visible(where, sight.window))
    m = softmax.row_max(s)
    p = softmax.query_weights(s, m)
    # Masking V copies all of V, so it is done only where 0 * NaN of a padded value shows.
    o = _mix(p, v)
    o = jax.lax.cond(jnp.isnan(o).any(), lambda: _mix_slowly(p, v, where.k_pos), lambda: o)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out.reshape(q.shape).astype(sight.dtype), lse.reshape(q.shape[:3])


@functools.partial(jax.jit, static_argnames="sight")
def blockwise(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    """See ``api.blockwise``."""
    run = _dense if _in_one(q.shape[2], k.shape[2]) else _blocked
    return grad.differentiable(run, xla_grad.backward, sight, q, k, v, where.within_reach(sight.window))


def _blocked(q: Array, k: Array, v: Array, where: Where, *, sight: Sight) -> Partial:
    (b, n, t, h), heads, s = q.shape, k.shape[1], k.shape[2]
    groups, bq, bk = n // heads, min(BLOCK_Q, t), min(BLOCK_K, s)
    # The last block of keys begins where it fits, and hides what the one before it has.
    starts = jnp.minimum(jnp.arange(-(-s // bk)) * bk, s - bk)
    at = starts[:, None] + jnp.arange(bk)
    k_pos = jnp.where(at >= jnp.arange(len(starts))[:, None] * bk, where.k_pos[:, at], softmax.EMPTY)
    admit = None if where.admit is None else where.admit[:, :, at]
    # A power of two is as well taken of the queries, which are fewer than the scores.
    early = math.frexp(sight.scale)[0] == 0.5  # noqa: PLR2004
    scale = 1.0 if early else sight.scale
    queries = cut.blocks(q * jnp.asarray(sight.scale, q.dtype) if early else q, 2, bq, 0)
    q_pos = cut.blocks(where.q_pos, 1, bq, softmax.EMPTY)
    let = None if admit is None else jnp.moveaxis(admit, 2, 0)
    spans = cut.BlockPositions(q_pos, jnp.moveaxis(k_pos, 1, 0), let)
    # Blocks that nothing is hidden in come first.
    kind = jnp.where(spans.all_visible(sight.window), 0, jnp.where(spans.any_visible(sight.window), 1, 2))
    order = jnp.argsort(kind, axis=1, stable=True).astype(jnp.int32)
    plain, pairs = (jnp.sum(kind <= last, axis=1, dtype=jnp.int32) for last in (0, 1))

    def kv_head(y: _KvHead, keys: _Cut, values: _Cut) -> tuple[Array, Array]:
        def query_block(z: tuple[Array, ...]) -> tuple[Array, Array]:
            q_i, pos_i, order_i, plain_i, pairs_i = z

            def scores(j: Int[Array, ""]) -> Float[Array, "R S"]:
                return softmax.cap(products.scores(q_i, keys(starts[j]), scale), sight.softcap)

            def in_sight(c: Int[Array, ""], mlo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                j = order_i[c]
                return softmax.grow(*mlo, scores(j), lambda p: products.mix(p, values(starts[j])))

            def partly(c: Int[Array, ""], mlo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                j = order_i[c]
                let = None if y.admit is None else y.admit[j][None, None]
                see = visible(Where(pos_i[None], y.k_pos[j][None], let), sight.window).reshape(bq, bk)
                s = softmax.hide(scores(j), jnp.tile(see, (groups, 1)))
                v_j = _without_padding(values(starts[j]), y.k_pos[j])
                return softmax.grow(*mlo, s, lambda p: products.mix(p, v_j))

            rows = q_i.shape[0]
            start = (
                jnp.full(rows, -jnp.inf, jnp.float32),
                jnp.zeros(rows, jnp.float32),
                jnp.zeros((rows, h), jnp.float32),
            )
            mlo = jax.lax.fori_loop(0, plain_i, in_sight, start)
            out, lse = softmax.finish(*jax.lax.fori_loop(plain_i, pairs_i, partly, mlo))
            return out.astype(sight.dtype), lse

        return jax.lax.map(query_block, (y.q, y.q_pos, order, plain, pairs))

    def one_by_one(y: _KvHead, k: Array, v: Array) -> tuple[Array, Array]:
        """A KV head's scores stay in the cache."""
        k, v = (_as_bits(x) for x in (k, v))

        def block_of(x: Array, kv_head: Int[Array, ""]) -> _Cut:
            def cut_out(start: Int[Array, ""]) -> Array:
                return _from_bits(jax.lax.dynamic_slice(x, (kv_head, start, 0), (1, bk, h))[0])

            return cut_out

        def one(z: tuple[Int[Array, ""], _KvHead]) -> tuple[Array, Array]:
            return kv_head(z[1], block_of(k, z[0]), block_of(v, z[0]))

        return jax.lax.map(one, (jnp.arange(len(k)), y))

    def at_once(y: _KvHead, k: Array, v: Array) -> tuple[Array, Array]:
        def block_of(x: Array) -> _Cut:
            return lambda start: jax.lax.dynamic_slice_in_dim(x, start, bk)

        return jax.vmap(lambda y, k, v: kv_head(y, block_of(k), block_of(v)))(y, k, v)

    kv_heads = _KvHead(
        # [I, B, N, T, H] to a row of blocks for each KV head, the query heads of a block together
        jnp.moveaxis(queries.reshape(-1, b * heads, groups * bq, h), 0, 1),
        jnp.repeat(jnp.moveaxis(q_pos, 1, 0), heads, axis=0),
        jnp.repeat(k_pos, heads, axis=0),
        None if admit is None else admit.reshape(b * heads, -1, bk),
    )
    operands = (kv_heads, *(x.reshape(b * heads, s, h) for x in (k, v)))
    out, lse = jax.lax.platform_dependent(*operands, cpu=one_by_one, default=at_once)
    out = jnp.moveaxis(out, 1, 0).reshape(-1, b, n, bq, h)
    lse = jnp.moveaxis(lse, 1, 0).reshape(-1, b, n, bq)
    return cut.joined(out, 2, t), cut.joined(lse, 2, t)


class _KvHead(NamedTuple):
    """A row's KV head and its G query heads in blocks; of all KV heads, X = B * K, with an axis before."""

    q: Float[Array, "I GT H"]
    q_pos: Int[Array, "I T"]
    k_pos: Int[Array, "J S"]
    admit: Bool[Array, "J S"] | None


_Cut = Callable[["Int[Array, '']"], "Float[Array, 'S H']"]
"""A block of a KV head's keys or values, by where it begins."""


def _as_bits(x: Array) -> Array:
    """XLA on CPU turns a bfloat16 array into float32 to cut a block out of it; not its bits."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


@functools.partial(jax.jit, static_argnames="sight")
def column_mass(
    q: Array, k: Array, lse: Array, weights: Array, where: Where, *, sight: Sight
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    (b, n, t, _), s = q.shape, k.shape[2]
    grouped = cut.grouped(q, k)
    lse = lse.reshape(grouped.shape[:-1])
    where = block_lists.weighed(where, weights).within_reach(sight.window)
    if _in_one(t, s):
        return _mass(grouped, k, lse, weights, where, sight).reshape(b, n, s)
    x = cut.both(grouped, k, where)
    bq, bk = x.q.shape[4], x.k.shape[3]
    lses, weightss = cut.blocks(lse, 3, bq, 0.0), cut.blocks(weights, 1, bq, 0.0)
    order, count = cut.listed(x.at.any_visible(sight.window).T)

    def key_block(y: tuple[Array, ...]) -> Float[Array, "B K G S"]:
        j, order_j, count_j = y

        def query_block(c: Int[Array, ""], total: Float[Array, "B K G S"]) -> Float[Array, "B K G S"]:
            i = order_j[c]
            return total + _mass(x.q[i], x.k[j], lses[i], weightss[i], x.where(i, j), sight)

        return jax.lax.fori_loop(0, count_j, query_block, jnp.zeros((*lse.shape[:3], bk), jnp.float32))

    mass = jax.lax.map(key_block, (jnp.arange(x.k.shape[0]), order, count))
    return cut.joined(mass, 3, s).reshape(b, n, s)


def _mass(
    q: Float[Array, "B K G T H"], k: Array, lse: Array, weights: Array, where: Where, sight: Sight
) -> Float[Array, "B K G S"]:
    p = softmax.probabilities(_scores(q, k, sight), visible(where, sight.window), lse)
    return jnp.einsum("bkgts,bt->bkgs", p, weights, precision=jax.lax.Precision.HIGHEST)
