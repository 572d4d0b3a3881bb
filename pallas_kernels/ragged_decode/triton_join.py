"""The second kernel of ragged_decode on GPU: a program a query, which joins the items of its KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.ragged_decode.triton_pages import shares
from pallas_kernels.ragged_decode.worklist import ReadSizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float

JOINED = 64
"""Items whose numerators are joined at once."""


def _body(sizes: ReadSizes, count: int, selected: bool) -> Any:
    """The kernel: (length, o, m, l) of a KV head's items -> (out, lse) of one query, in one order always."""
    most = pl.next_power_of_2(sizes.items)
    few = min(JOINED, most)

    def body(length: Any, o: Any, m: Any, l: Any, out: Any, lse: Any) -> None:
        query = pl.program_id(0)
        items = shares(sizes, count, selected, length[0]).items

        def part(first: Any, size: int) -> tuple[Array, Array, Array]:
            """(max, denominator, number) of some items."""
            at = first + jnp.arange(size, dtype=jnp.int32)
            there, query_at = at < items, jnp.full((size,), query, jnp.int32)
            denominator = compat.load(l.at[at, query_at], mask=there)
            top = compat.load(m.at[at, query_at], mask=there, other=tiles.HIDDEN)
            return jnp.where(denominator != 0, top, tiles.HIDDEN), denominator, at

        top, denominators, _ = part(0, most)
        shift = jnp.max(top)
        shift = jnp.where(shift > tiles.HIDDEN, shift, 0.0)
        total = jnp.sum(jnp.exp(top - shift) * denominators)
        wide = pl.next_power_of_2(sizes.h)
        channel = jax.lax.broadcasted_iota(jnp.int32, (few, wide), 1)

        def step(c: Array, carry: Array) -> Array:
            top, _, at = part(c * few, few)
            place = jnp.broadcast_to(at[:, None], channel.shape)
            there = (place < items) & (channel < sizes.h)
            x = compat.load(o.at[place, jnp.full(channel.shape, query, jnp.int32), channel], mask=there)
            return carry + jnp.sum(jnp.exp(top - shift)[:, None] * x, axis=0)

        sums = jax.lax.fori_loop(0, pl.cdiv(items, few), step, jnp.zeros((wide,), jnp.float32))
        some = total != 0  # NaN is something
        safe = jnp.where(some, total, 1.0)
        at = jnp.arange(wide, dtype=jnp.int32)
        compat.store(out.at[at], jnp.where(some, sums / safe, 0.0), mask=at < sizes.h)
        lse[0] = jnp.where(some, shift + jnp.log(safe), -jnp.inf)

    return body


def join(
    sizes: ReadSizes, entries: int, selected: bool, length: Array, o: Array, m: Array, l: Array
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"]]:
    """Partials of items to partials of KV heads."""
    (kv_heads, _, total, h), one = o.shape, pl.BlockSpec((None, 1), lambda r, x: (x, r))
    every = [
        pl.BlockSpec((None, *x.shape[1:]), lambda r, x, n=x.ndim: (x, *(0,) * (n - 1))) for x in (o, m, l)
    ]
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((kv_heads, total, h), (kv_heads, total))]
    return pl.pallas_call(
        _body(sizes, entries, selected),
        grid=(total, kv_heads),
        in_specs=[pl.BlockSpec((None, 1), lambda r, x: (x, 0)), *every],
        out_specs=[pl.BlockSpec((None, None, h), lambda r, x: (x, r, 0)), one],
        out_shape=shapes,
        compiler_params=compat.triton_params(warps=4, stages=1),
        cost_estimate=pl.CostEstimate(
            flops=2 * o.size, transcendentals=2 * m.size, bytes_accessed=4 * (o.size + kv_heads * total * h)
        ),
        interpret=sizes.interpret,
        name="ragged_decode_join",
    )(length, o, m, l)
