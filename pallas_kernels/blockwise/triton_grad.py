"""The backward pass of blockwise on GPU: one body for keys and values, one for queries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise import tiles as block_tiles
from pallas_kernels.blockwise.sight import Above, Sight, Where
from pallas_kernels.blockwise.triton import Grid, Operand, over, sizes, wide
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array


def _key_body(sight: Sight, bq: int, narrowed: bool) -> Callable[..., None]:
    def body(
        listed: Any, q: Any, up: Any, lse: Any, delta: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *refs: Any
    ) -> None:
        admit, (to_k, to_v) = (refs[0], refs[1:]) if narrowed else (None, refs)
        keys, values, at = k[...], v[...], k_pos[...][:, None]
        let = None if admit is None else admit[...][:, None]

        def visit(cut: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            seen = block_tiles.Seen(q_pos[cut][None, :], at, let)
            side = block_tiles.Side(q[cut, :], up[cut, :], lse[cut][None, :], delta[cut][None, :])
            return block_tiles.key_gradient(sight, keys, values, side, seen, *carry)

        nothing = jnp.zeros(keys.shape, jnp.float32)
        to_k[...], to_v[...] = over(listed, bq, visit, (nothing, nothing))

    return body


def _query_body(sight: Sight, bk: int, narrowed: bool) -> Callable[..., None]:
    def body(
        listed: Any, q: Any, up: Any, lse: Any, delta: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *refs: Any
    ) -> None:
        admit, (to_q,) = (refs[0], refs[1:]) if narrowed else (None, refs)
        side = block_tiles.Side(q[...], up[...], lse[...][:, None], delta[...][:, None])
        at = q_pos[...][:, None]

        def visit(cut: Any, dq: Array) -> Array:
            seen = block_tiles.Seen(at, k_pos[cut][None, :], None if admit is None else admit[cut][None, :])
            return block_tiles.query_gradient(sight, k[cut, :], v[cut, :], side, seen, dq)

        to_q[...] = over(listed, bk, visit, jnp.zeros(side.q.shape, jnp.float32))

    return body


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def backward(
    q: Array, k: Array, v: Array, where: Where, above: Above, *, sight: Sight, interpret: Any, blocks: Tuned
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32; q, k and v are 0 where they take no part. See ``grad.py``."""
    (b, n, t, h), heads, s = q.shape, k.shape[1], k.shape[2]
    count = n // heads * t
    bq, bk, *_ = chosen = sizes(blocks, "backward", count, k)
    x = block_lists.rows(wide(q), wide(k), where, sight.window, bq, bk, folded=True)
    pairs = block_lists.any_visible(x, sight.window, bq, bk)
    up, lse, delta = block_lists.folded(above, k, bq)
    arrays = [x.q, wide(up), lse, delta]
    keys = [x.k, wide(pad_to_multiple(v, 2, bk))]
    narrow = [] if x.admit is None else [x.admit]

    def inputs(q_block: int | None, k_block: int | None) -> list[Operand]:
        return [
            *((y, q_block) for y in arrays),
            *((y, k_block) for y in keys),
            (x.q_pos[:, None], q_block),
            (x.k_pos[:, None], k_block),
            *((y, k_block) for y in narrow),
        ]

    grid = Grid(b, heads, block_lists.lists_of(pairs.swapaxes(2, 3)), chosen, interpret)
    body = _key_body(sight, bq, bool(narrow))
    like = jax.ShapeDtypeStruct(x.k.shape, jnp.float32)
    dk, dv = grid.run(body, "blockwise_keys_gradient", inputs(None, bk), [(like, bk)] * 2, 4)
    grid = Grid(b, heads, block_lists.lists_of(pairs), chosen, interpret)
    body = _query_body(sight, bk, bool(narrow))
    like = jax.ShapeDtypeStruct(x.q.shape, jnp.float32)
    (dq,) = grid.run(body, "blockwise_queries_gradient", inputs(bq, None), [(like, bq)], 3)
    return dq[:, :, :count, :h].reshape(q.shape), dk[:, :, :s, :h], dv[:, :, :s, :h]
