"""decode_step as a sequence: gathers and scatters, a read of the ring, one of the pages, a merge."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise import xla as blockwise
from pallas_kernels.blockwise.sight import Sight, Where
from pallas_kernels.decode_step.call import Cache, Lists, Token
from pallas_kernels.decode_step.ref import leaving_slot
from pallas_kernels.merge import xla as merge
from pallas_kernels.ragged_decode import call, xla

if TYPE_CHECKING:
    from jaxtyping import Array


def _put(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    return old.at[index].set(value, mode="drop")


def _put_bits(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    held, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (old, value))
    return jax.lax.bitcast_convert_type(_put(held, index, new), old.dtype)


def _written(old: Array, index: tuple[Array, ...], value: Array) -> Array:
    """``old`` with ``value`` there; out of range: nothing is written."""
    value = value.astype(old.dtype)
    # XLA before jax 0.12 turns all of a bfloat16 array into float32 and back around a scatter on CPU.
    if old.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12):
        return jax.lax.platform_dependent(old, index, value, cpu=_put_bits, default=_put)
    return _put(old, index, value)


@functools.partial(jax.jit, static_argnames="scale")
def decode_step(token: Token, cache: Cache, lists: Lists, *, scale: float) -> tuple[Array, Array, Cache]:
    """See ``api.decode_step``."""
    (rows, heads, window, _), seen = cache.ring_k.shape, lists.seen[:, None]
    row, head, slot = jnp.arange(rows)[:, None], jnp.arange(heads)[None], jnp.maximum(seen, 0) % window
    old = [ring[row, head, slot] for ring in cache[:2]]
    page, at, enters = leaving_slot(cache, lists)

    # XLA on CPU keeps no order but that of data, and would copy the ring to write it beside a read. So what
    # is written comes out of the branch that uses what was read, where it is seemingly changed.
    def enter(k_pages: Array, v_pages: Array, *new: Array) -> tuple[Array, ...]:
        pools = (_written(pool, (page, at), x) for pool, x in zip((k_pages, v_pages), old))
        never = (seen < jnp.iinfo(seen.dtype).min + 1)[..., None]
        return *pools, *(jnp.where(never, x.astype(y.dtype), y) for x, y in zip(old, new))

    def if_any(*same: Array) -> Any:
        return jax.lax.cond(jnp.any(enters), enter, lambda *same: same, *same)

    # XLA on GPU copies both pools, K and V, in either branch.
    k_pages, v_pages, *new = jax.lax.platform_dependent(
        *cache[2:], *token[1:], cuda=enter, rocm=enter, default=if_any
    )
    slot = jnp.where(seen >= 0, slot, window)  # out of range: dropped by the scatter
    ring_k, ring_v = (_written(ring, (row, head, slot), x) for ring, x in zip(cache[:2], new))
    after = Cache(ring_k, ring_v, k_pages, v_pages)
    q, held = token.q[:, :, None], seen - (seen - jnp.arange(window)) % window
    parts = [
        blockwise.blockwise(q, *after[:2], Where(seen, held, None), sight=Sight(None, scale, None)),
        xla.ragged_decode(
            q,
            call.Pools(*after[2:], None),
            call.Lists(lists.table, lists.length + enters, None, None),
            options=call.Options(mass=False, scale=scale, softcap=None),
        ),
    ]
    out, lse = merge.merge(parts)
    return out[:, :, 0].astype(token.q.dtype), lse[:, :, 0], after
