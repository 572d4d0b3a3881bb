"""ragged_decode by definition: gather every KV head's pages, mask, softmax, all in float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.ragged_decode import codes
from pallas_kernels.ragged_decode.call import Lists, Options, Pools

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def page_lists(lists: Lists, pool: int, slots: int) -> tuple[Int[Array, "B K J"], Int[Array, "B K J"]]:
    """Which pool pages each KV head reads, and how many live slots each of them holds.

    Pages that are not there (EMPTY, out of range, beyond the length) come back as page 0 with 0
    live slots, so that the ids are always safe to gather with.
    """
    table, length, pages, *_ = lists
    m = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None, :] if pages is None else pages
    there = (m >= 0) & (m < table.shape[2])
    m = jnp.where(there, m, 0)
    ids = table if pages is None else jnp.take_along_axis(table, m, axis=2, mode="promise_in_bounds")
    there &= (ids >= 0) & (ids < pool)
    live = jnp.where(there, jnp.clip(length[:, :, None] - m * slots, 0, slots), 0)
    return jnp.where(live > 0, ids, 0), live


def live_slots(
    live: Int[Array, "B K J"], chosen: Bool[Array, "B K J S"] | None, slots: int
) -> Bool[Array, "B K J S"]:
    """The live slots of each listed page as a mask, narrowed to the chosen ones."""
    mask = jnp.arange(slots)[None, None, None, :] < live[..., None]
    return mask if chosen is None else mask & chosen


def spread(mass: Float[Array, "B N J S"], lists: Lists) -> Float[Array, "B N M S"]:
    """Mass of the selected pages to its place among all M pages of the list."""
    if lists.pages is None:
        return mass
    pages, (_, k, count), (b, n, j, s) = lists.pages, lists.table.shape, mass.shape
    to = jnp.where(pages < 0, count, pages)
    row, head = jnp.arange(b)[:, None, None], jnp.arange(k)[None, :, None]
    out = jnp.zeros((b, k, count, n // k, s), jnp.float32)
    out = out.at[row, head, to].add(mass.reshape(b, k, n // k, j, s).swapaxes(2, 3), mode="drop")
    return out.swapaxes(2, 3).reshape(b, n, count, s)


@functools.partial(jax.jit, static_argnames="options")
def ragged_decode(q: Array, pools: Pools, lists: Lists, *, options: Options) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), (pool, size, _), heads = q.shape, pools.k.shape, lists.table.shape[1]
    ids, live = page_lists(lists, pool, size)
    mask = live_slots(live, lists.slots, size)
    listed = jax.tree.map(lambda x: x[ids], pools)
    if pools.scales is None:
        k, v = (x.astype(jnp.float32) for x in (listed.k, listed.v))
    else:
        k, v = codes.values(listed.k, listed.scales, 0), codes.values(listed.v, listed.scales, 1)
    k, v = jnp.where(mask[..., None], k, 0.0), jnp.where(mask[..., None], v, 0.0)
    grouped = q.astype(jnp.float32).reshape(b, heads, n // heads, t, h)
    # Of a KV head without a live slot: 0 times NaN is NaN, in a gradient too.
    grouped = jnp.where(jnp.any(mask, axis=(2, 3))[..., None, None, None], grouped, 0.0)
    s = jnp.einsum("bkgth,bkjsh->bkgtjs", grouped, k, precision=jax.lax.Precision.HIGHEST) * options.scale
    s, see = softmax.cap(s.reshape(*s.shape[:4], -1), options.softcap), mask.reshape(b, heads, 1, 1, -1)
    if lists.bias is not None:
        s = s + lists.bias.astype(jnp.float32).reshape(b, heads, n // heads, 1, -1)
    hidden = softmax.hide(s, see)
    m = softmax.row_max(hidden)
    p = softmax.query_weights(hidden, m)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v.reshape(b, heads, -1, h), precision=jax.lax.Precision.HIGHEST)
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    out, lse_all = out.reshape(b, n, t, h), lse.reshape(b, n, t)
    if not options.mass:
        return out, lse_all
    received = jnp.sum(softmax.probabilities(s, see, lse), axis=3).reshape(b, n, mask.shape[2], size)
    return out, lse_all, spread(received, lists)
