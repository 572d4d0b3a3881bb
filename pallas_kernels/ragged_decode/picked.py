"""What a selection needs of the pages: every slot's score in place, and attention over slots in hand.

Scores come from reading the pool in place (see ``flat``): keys are read once where they are, values
never. The slots that are picked by them are gathered once, and every use of them reads that copy.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.ragged_decode import codes, flat
from pallas_kernels.ragged_decode.call import Lists
from pallas_kernels.ragged_decode.ref import live_slots, page_lists

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num


@functools.partial(jax.jit, static_argnames="each")
def largest_scores(
    q: Float[Array, "B N H"],
    k_pages: Num[Array, "P S X"],
    table: Int[Array, "B K M"],
    length: Int[Array, "B K"],
    scales: Any,
    each: bool = False,
) -> Float[Array, "B X M S"]:
    """See ``api.largest_scores``; with ``each``, of every query head."""
    pool, size = k_pages.shape[:2]
    (b, n, h), heads = q.shape, table.shape[1]
    ids, live = page_lists(Lists(table, length, None, None), pool, size)
    own, _ = flat.owners(ids, live, pool)
    x = q.reshape(b * heads, n // heads, h)
    x = x[jnp.minimum(own.kv_head, b * heads - 1)]
    see = live_slots(live, None, size)
    if not each:
        return softmax.hide(_of_pool(x, k_pages, scales, own)[ids] * h**-0.5, see)
    by_query = [_of_pool(x[:, i : i + 1], k_pages, scales, own)[ids] for i in range(x.shape[1])]
    return softmax.hide(jnp.stack(by_query, axis=2) * h**-0.5, see[:, :, None]).reshape(b, n, *see.shape[2:])


def _of_pool(
    q: Float[Array, "P G H"],
    k: Num[Array, "P S X"],
    scales: Any,
    own: flat.Owners,
) -> Float[Array, "P S"]:
    """Largest product of each slot with its page's queries; chunks of codes that nobody owns are skipped."""
    if scales is None:
        return products.scores(q, k, 1.0).max(axis=1)
    chunks = flat.chunks_of(own, k.shape[1], flat.CHUNK)

    def one(i: Int[Array, ""], largest: Float[Array, "P S"]) -> Float[Array, "P S"]:
        own_q, keys = chunks.cut(q, i), chunks.cut(k, i)
        if isinstance(scales, codes.Grouped):
            keys = codes.values(keys, jax.tree.map(lambda x: chunks.cut(x, i), scales), 0)
        else:
            own_q, keys = own_q * chunks.cut(scales, i)[:, None, 0], codes.floats(keys)
        part = products.scores(own_q, keys, 1.0).max(axis=1)
        return chunks.put(largest, part, i)

    return jax.lax.fori_loop(0, chunks.busy, one, jnp.zeros(k.shape[:2], jnp.float32))


@functools.partial(jax.jit, static_argnames=("mass", "scale", "softcap"))
def gathered(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    live: Bool[Array, "B K C"],
    *,
    mass: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Array, ...]:
    """See ``api.gathered_decode``."""
    b, n, t, h = q.shape
    heads = k.shape[1]
    x = q.reshape(b, heads, n // heads * t, h)
    s, see = softmax.cap(products.scores(x, k, scale), softcap), live[:, :, None]
    hidden = softmax.hide(s, see)
    m = softmax.row_max(hidden)
    p = softmax.query_weights(hidden, m)
    o = products.mix(p, jnp.where(live[..., None], v, jnp.zeros((), v.dtype)))
    out, lse = softmax.finish(m, jnp.sum(p, axis=-1), o)
    whole = out.reshape(b, n, t, h), lse.reshape(b, n, t)
    if not mass:
        return whole
    return *whole, softmax.probabilities(s, see, lse).reshape(b, n, t, -1).sum(axis=2)
