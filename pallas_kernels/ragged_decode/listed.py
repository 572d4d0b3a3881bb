"""The listed form of ragged_decode: follow each KV head's list of pages, gathering what it names.

For selections, whose cost must follow the pages selected, and for many queries, where the two
products outweigh the gather. ``at_once`` gathers everything listed; ``by_kv_head`` gathers a block
of pages of one KV head at a time and keeps running softmax statistics, so memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.ragged_decode import codes
from pallas_kernels.ragged_decode.call import Options, Pools

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num

BLOCK = 512
"""Slots gathered together by ``by_kv_head``."""


def _gather(
    pool: Num[Array, "P S X"],
    ids: Int[Array, "... J"],
    scales: Any,
    which: int,
    mask: Bool[Array, "... J S"] | None,
) -> Float[Array, "... JS H"]:
    """The listed pages of keys (0) or values (1) one after another, as floats; zeros where masked."""
    x = pool[ids]
    if scales is not None:
        x = codes.values(x, jax.tree.map(lambda of_pages: of_pages[ids], scales), which)
    if mask is not None:
        x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
    return x.reshape(*ids.shape[:-1], -1, x.shape[-1])


def at_once(
    q: Float[Array, "X R H"],
    pools: Pools,
    ids: Int[Array, "X J"],
    mask: Bool[Array, "X J S"],
    bias: Float[Array, "X R J S"] | None,
    options: Options,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Float[Array, "X R JS"] | None]:
    """(out, lse, probabilities with mass) of X KV heads in one go."""
    scales = pools.scales
    s = products.scores(q, _gather(pools.k, ids, scales, 0, None), options.scale)
    s, see = softmax.cap(s, options.softcap), mask.reshape(mask.shape[0], 1, -1)
    s = s if bias is None else s + bias.reshape(s.shape)
    hidden = softmax.hide(s, see)
    m = softmax.row_max(hidden)
    p = softmax.query_weights(hidden, m)
    o = products.mix(p, _gather(pools.v, ids, scales, 1, mask))
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    return out, lse, softmax.probabilities(s, see, lse) if options.mass else None


def by_kv_head(
    q: Float[Array, "X R H"],
    pools: Pools,
    ids: Int[Array, "X J"],
    mask: Bool[Array, "X J S"],
    bias: Float[Array, "X R J S"] | None,
    options: Options,
    groups: int,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Float[Array, "X G JS"] | None]:
    """(out, lse, mass of each of the G query heads), one KV head and one block after the other."""
    (j, size), scales = mask.shape[1:], pools.scales
    c = max(1, min(j, BLOCK // size))
    pad = -j % c
    ids = jnp.pad(ids, ((0, 0), (0, pad))).reshape(ids.shape[0], -1, c)
    mask = jnp.pad(mask, ((0, 0), (0, pad), (0, 0))).reshape(*ids.shape, size)
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, pad), (0, 0)))
        bias = bias.reshape(*bias.shape[:2], -1, c * size).swapaxes(1, 2)  # [X, blocks, R, cS]
    busy = jnp.any(mask, axis=(2, 3))
    order = jnp.argsort(~busy, axis=1, stable=True)

    def kv_head(x: tuple[Array, ...]) -> tuple[Array, ...]:
        q_i, ids_i, mask_i, order_i, count_i, *bias_i = x

        def read(i: Int[Array, ""]) -> tuple[Float[Array, "R cS"], Bool[Array, "1 cS"], Float[Array, "cS H"]]:
            # Tied to i, bfloat16 pools cannot be converted as a whole before the loop (XLA on CPU would).
            k_loop, v_loop, at = jax.lax.optimization_barrier((pools.k, pools.v, order_i[i]))
            k = _gather(k_loop, ids_i[at], scales, 0, None)
            v = _gather(v_loop, ids_i[at], scales, 1, mask_i[at])
            s = softmax.cap(products.scores(q_i, k, options.scale), options.softcap)
            s = s + bias_i[0][at] if bias_i else s
            return s, mask_i[at].reshape(1, -1), v

        out, lse = _attend(q_i.shape, count_i, read)
        if not options.mass:
            return out, lse

        def receive(i: Int[Array, ""], total: Float[Array, "X G cS"]) -> Float[Array, "X G cS"]:
            p = softmax.probabilities(*read(i)[:2], lse).reshape(groups, -1, c * size)
            return total.at[order_i[i]].set(jnp.sum(p, axis=1))

        nothing = jnp.zeros((ids_i.shape[0], groups, c * size), jnp.float32)
        received = jax.lax.fori_loop(0, count_i, receive, nothing)
        return out, lse, received.swapaxes(0, 1).reshape(groups, -1)[:, : j * size]

    more = () if bias is None else (bias,)
    results = jax.lax.map(kv_head, (q, ids, mask, order, jnp.sum(busy, axis=1), *more))
    return results[0], results[1], results[2] if options.mass else None


def _attend(
    shape: tuple[int, ...], count: Int[Array, ""], read: Callable[..., tuple[Array, Array, Array]]
) -> tuple[Float[Array, "R H"], Float[Array, " R"]]:
    """Online softmax over ``count`` blocks, each read as (scores [R, S], visible [1, S], values [S, H])."""

    def step(i: Int[Array, ""], mlo: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        s, see, v = read(i)
        return softmax.grow(*mlo, softmax.hide(s, see), lambda p: products.mix(p, v))

    start = (jnp.full(shape[:1], -jnp.inf), jnp.zeros(shape[:1]), jnp.zeros(shape, jnp.float32))
    return softmax.finish(*jax.lax.fori_loop(0, count, step, start))
