"""The backward pass of blockwise on TPU: one body for keys and values, one for queries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise import tiles as block_tiles
from pallas_kernels.blockwise.mosaic_tpu import LANES, Grid, Spec, column, row, sizes, step
from pallas_kernels.blockwise.sight import Above, Sight, Where
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array


def _key_body(grid: Grid, sight: Sight, narrowed: bool) -> Callable[..., None]:
    def body(order: Any, count: Any, *refs: Any) -> None:
        q, up, lse, delta, k, v, q_pos, k_pos, *refs_ = refs
        admit, refs_ = (refs_[0], refs_[1:]) if narrowed else (None, refs_)
        to_k, to_v, dk, dv, at, let = (*refs_, None)[:6]
        now = step(grid, count)

        @pl.when(now.first)
        def _() -> None:
            dk[...] = jnp.zeros_like(dk)
            dv[...] = jnp.zeros_like(dv)
            at[...] = column(k_pos[...])
            if admit is not None:
                let[...] = column(admit[...])

        @pl.when(now.live)
        def _() -> None:
            seen = block_tiles.Seen(q_pos[...], at[...], None if admit is None else let[...])
            side = block_tiles.Side(q[...], up[...], lse[...], delta[...])
            dk[...], dv[...] = block_tiles.key_gradient(sight, k[...], v[...], side, seen, dk[...], dv[...])

        @pl.when(now.last)
        def _() -> None:
            to_k[...] = dk[...]
            to_v[...] = dv[...]

    return body


def _query_body(grid: Grid, sight: Sight, narrowed: bool) -> Callable[..., None]:
    def body(order: Any, count: Any, *refs: Any) -> None:
        q, up, lse, delta, k, v, q_pos, k_pos, *refs_ = refs
        admit, (to_q, dq, of_lse, of_delta, at) = (refs_[0], refs_[1:]) if narrowed else (None, refs_)
        now = step(grid, count)

        @pl.when(now.first)
        def _() -> None:
            dq[...] = jnp.zeros_like(dq)
            of_lse[...] = column(lse[...])
            of_delta[...] = column(delta[...])
            at[...] = column(q_pos[...])

        @pl.when(now.live)
        def _() -> None:
            seen = block_tiles.Seen(at[...], k_pos[...], None if admit is None else admit[...])
            side = block_tiles.Side(q[...], up[...], of_lse[...], of_delta[...])
            dq[...] = block_tiles.query_gradient(sight, k[...], v[...], side, seen, dq[...])

        @pl.when(now.last)
        def _() -> None:
            to_q[...] = dq[...]

    return body


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def backward(
    q: Array, k: Array, v: Array, where: Where, above: Above, *, sight: Sight, interpret: Any, blocks: Tuned
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32; q, k and v are 0 where they take no part. See ``grad.py``."""
    (b, n, t, h), heads, s = q.shape, k.shape[1], k.shape[2]
    count = n // heads * t
    bq, bk = sizes(blocks, "backward", count, k)
    x = block_lists.rows(q, k, where, sight.window, bq, bk, folded=True)
    pairs = block_lists.any_visible(x, sight.window, bq, bk)
    up, lse, delta = block_lists.folded(above, k, bq)
    arrays = [x.q, up, row(lse), row(delta)]
    keys = [x.k, pad_to_multiple(v, 2, bk)]
    narrow = [] if x.admit is None else [row(x.admit)]

    def inputs(q_side: str, k_side: str) -> list[Spec]:
        return [
            *((y, q_side, bq) for y in arrays),
            *((y, k_side, bk) for y in keys),
            (row(x.q_pos), q_side, bq),
            (row(x.k_pos), k_side, bk),
            *((y, k_side, bk) for y in narrow),
        ]

    columns = [pltpu.VMEM((bk, LANES), jnp.int32)] * (1 + len(narrow))
    grid = Grid(b, heads, block_lists.lists_of(pairs.swapaxes(2, 3)), interpret)
    like = jax.ShapeDtypeStruct(x.k.shape, jnp.float32)
    dk, dv = grid.run(
        _key_body(grid, sight, bool(narrow)),
        "blockwise_keys_gradient",
        inputs("inner", "outer"),
        [(like, "outer", bk)] * 2,
        [pltpu.VMEM((bk, h), jnp.float32)] * 2 + columns,
        4,
    )
    grid = Grid(b, heads, block_lists.lists_of(pairs), interpret)
    (dq,) = grid.run(
        _query_body(grid, sight, bool(narrow)),
        "blockwise_queries_gradient",
        inputs("outer", "inner"),
        [(jax.ShapeDtypeStruct(x.q.shape, jnp.float32), "outer", bq)],
        [
            pltpu.VMEM((bq, h), jnp.float32),
            *[pltpu.VMEM((bq, LANES), jnp.float32)] * 2,
            pltpu.VMEM((bq, LANES), jnp.int32),
        ],
        3,
    )
    return dq[:, :, :count].reshape(q.shape), dk[:, :, :s], dv[:, :, :s]
