"""ragged_decode in plain XLA: which of its forms runs, and the way in and out of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_decode import flat, listed
from pallas_kernels.ragged_decode.ref import live_slots, page_lists, spread

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num

FLAT_ROWS = 32
"""Up to this many queries of a stream (G * T) the pool is walked flat."""

AT_ONCE = 1 << 21
"""Up to this many floats, scores or gathered keys of all streams are held at once. (Measured on two CPU
cores: equal to stream by stream at 2 ** 20, up to twice as slow at 2 ** 22.)"""


@functools.partial(jax.jit, static_argnames=("mass", "scale", "softcap"))
def ragged_decode(
    q: Float[Array, "B N T H"],
    k_pages: Num[Array, "P S H"],
    v_pages: Num[Array, "P S H"],
    table: Int[Array, "B K M"],
    length: Int[Array, "B K"],
    scales: Float[Array, "P 2 H"] | None,
    pages: Int[Array, "B K J"] | None,
    slots: Bool[Array, "B K J S"] | None,
    *,
    mass: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), (pool, size, _), heads = q.shape, k_pages.shape, table.shape[1]
    streams, groups = b * heads, n // heads
    ids, live = page_lists(table, length, pages, pool, size)
    x = q.reshape(streams, groups * t, h)
    if pages is None and groups * t <= FLAT_ROWS:
        out, lse, received = _flat(x, k_pages, v_pages, ids, live, scales, scale, softcap, mass)
    else:
        mask = live_slots(live, slots, size).reshape(streams, -1, size)
        lists = ids.reshape(streams, -1)
        if lists.size * size * max(groups * t, h) <= AT_ONCE:
            out, lse, received = listed.at_once(
                x, k_pages, v_pages, lists, mask, scales, scale, softcap, mass
            )
        else:
            out, lse, received = listed.by_stream(
                x, k_pages, v_pages, lists, mask, scales, scale, softcap, groups, mass
            )
    whole = out.reshape(b, n, t, h), lse.reshape(b, n, t)
    if received is None:
        return whole
    received = jnp.sum(received.reshape(b, n, -1, ids.shape[2], size), axis=2)
    return *whole, spread(received, pages, table.shape[2])


def _flat(
    q: Float[Array, "X R H"],
    k_pages: Num[Array, "P S H"],
    v_pages: Num[Array, "P S H"],
    ids: Int[Array, "B K M"],
    live: Int[Array, "B K M"],
    scales: Float[Array, "P 2 H"] | None,
    scale: float,
    softcap: float | None,
    mass: bool,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Float[Array, "X R MS"] | None]:
    own = flat.owners(ids, live, k_pages.shape[0])
    streams = q.shape[0]
    if scales is None:
        parts = flat.of_floats(q, k_pages, v_pages, own, scale, softcap)
        out, lse = flat.combine(parts, own, streams)

        def again() -> Float[Array, "X R H"]:
            return flat.combine(parts._replace(o=flat.without_dead(parts.p, v_pages, own)), own, streams)[0]

        out = jax.lax.cond(jnp.isnan(out).any(), again, lambda: out)
    else:
        parts = flat.of_int8(q, k_pages, v_pages, own, scales, scale, softcap)
        out, lse = flat.combine(parts, own, streams)
    if not mass:
        return out, lse, None
    p = jnp.where((live > 0)[..., None, None], flat.received(parts, lse, own)[ids], 0.0)
    return out, lse, p.reshape(streams, -1, *p.shape[3:]).swapaxes(1, 2)
