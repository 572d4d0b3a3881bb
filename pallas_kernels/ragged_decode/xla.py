"""ragged_decode in plain XLA: which of its forms runs, and the way in and out of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_decode import flat, listed
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.ref import live_slots, page_lists, spread

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FLAT_ROWS = 32
"""Up to this many queries of a KV head (G * T) the pool is read flat."""

AT_ONCE = 1 << 21
"""Up to this many floats, scores or gathered keys of all KV heads are held at once. (Measured on two CPU
cores: equal to KV head by KV head at 2 ** 20, up to twice as slow at 2 ** 22.)"""


@functools.partial(jax.jit, static_argnames="options")
def ragged_decode(q: Array, pools: Pools, lists: Lists, *, options: Options) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    (b, n, t, h), (pool, size, _), heads = q.shape, pools.k.shape, lists.table.shape[1]
    kv_heads, groups = b * heads, n // heads
    ids, live = page_lists(lists, pool, size)
    x = q.reshape(kv_heads, groups * t, h)
    if lists.pages is None and lists.bias is None and groups * t <= FLAT_ROWS and not options.shared:
        out, lse, received = _flat(x, pools, ids, live, options)
    else:
        mask = live_slots(live, lists.slots, size).reshape(kv_heads, -1, size)
        named, bias = ids.reshape(kv_heads, -1), None
        if lists.bias is not None:
            bias = jnp.repeat(
                lists.bias.astype(jnp.float32).reshape(kv_heads, groups, *mask.shape[1:]), t, axis=1
            )
        if named.size * size * max(groups * t, h) <= AT_ONCE:
            out, lse, received = listed.at_once(x, pools, named, mask, bias, options)
        else:
            out, lse, received = listed.by_kv_head(x, pools, named, mask, bias, options, groups)
    whole = out.reshape(b, n, t, h), lse.reshape(b, n, t)
    if received is None:
        return whole
    received = jnp.sum(received.reshape(b, n, -1, ids.shape[2], size), axis=2)
    return *whole, spread(received, lists)


def _flat(
    q: Float[Array, "X R H"],
    pools: Pools,
    ids: Int[Array, "B K M"],
    live: Int[Array, "B K M"],
    options: Options,
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Float[Array, "X R MS"] | None]:
    own, lost = flat.owners(ids, live, pools.k.shape[0])
    kv_heads = q.shape[0]
    if pools.scales is None:
        out, lse, parts = flat.of_floats(q, pools, own, options)

        def again() -> Float[Array, "X R H"]:
            return flat.combine(flat.without_dead(q, pools, own, options), kv_heads)[0]

        out = jax.lax.cond(jnp.isnan(out).any(), again, lambda: out)
    else:
        parts = flat.of_codes(q, pools, own, options)
        out, lse = flat.combine(parts, kv_heads)
    lse = jnp.where(lost[:, None], jnp.nan, lse)
    out = jnp.where(lost[:, None, None], jnp.nan, out)
    if parts is None or not options.mass:
        return out, lse, None
    see = live_slots(live, None, pools.k.shape[1])[..., None, :]
    p = jnp.where(see, flat.received(parts, lse)[ids], 0.0)
    return out, lse, p.reshape(kv_heads, -1, *p.shape[3:]).swapaxes(1, 2)
