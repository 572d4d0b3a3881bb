"""A tile of ragged_decode on TPU as values: pages that lie in a buffer, their numbers, scores and outputs.

Codes are multiplied without their scales, which are a page's: queries take those of keys, outputs those of
values. So a product is of one page, unless queries are few: then it is of as many pages as fill a matrix
unit, with the queries once a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import lowering, tiles
from pallas_kernels.ragged_decode import codes, worklist
from pallas_kernels.ragged_decode.mosaic_tpu_fetch import LANES, Fetch
from pallas_kernels.ragged_decode.worklist import ReadSizes

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

MATRIX_UNIT = {"TPU v2": 128, "TPU v3": 128, "TPU v4": 128, "TPU v5": 128}
"""Rows and columns of a matrix unit, by how a kind of device begins; of later ones 256."""

FEW_ROWS = 16
"""Queries of a KV head up to which several pages of codes go through one product, in rows of their own."""

HIGH_BITS = np.int32(0xF0F0F0F0 - (1 << 32))


def turned(sizes: ReadSizes) -> bool:
    """Whether pages are [H, S]: how XLA holds pools of short heads."""
    return sizes.part % LANES != 0 and sizes.slots % LANES == 0


def live(sizes: ReadSizes, fetch: Fetch, item: Array) -> Callable[[Array | int], Array]:
    """Live slots of each page of an item; 0 of a page it does not hold."""
    held, numbers, bits = fetch.held[item], fetch.entries.of(item), (1 << worklist.shift(sizes.slots)) - 1
    return lambda p: jnp.where(p < held, numbers(p), 0) & bits


def visible(sizes: ReadSizes, fetch: Fetch, item: Array, first: int, chosen: Any) -> Bool[Array, "1 Y"]:
    """Which slots of a tile are live, and chosen."""
    of = live(sizes, fetch, item)

    def page(p: int) -> Array:
        slot = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.slots), 1)
        return (slot < of(p)).astype(jnp.int32)

    see = jnp.concatenate([page(first + p) for p in range(sizes.tile)], axis=1)
    return (see if chosen is None else see * chosen[:, slots(sizes, first)]) > 0


def slots(sizes: ReadSizes, first: int) -> slice:
    """A tile's of an item."""
    return slice(first * sizes.slots, (first + sizes.tile) * sizes.slots)


def _numbers(sizes: ReadSizes, page: Array, dtype: Any) -> Float[Array, "S H"]:
    """A page's numbers, or codes; of two codes a byte ``codes.TIMES`` times, one part beside the other."""
    if sizes.parts == 1:
        return page.astype(dtype)
    # As ``codes.halves``, of four bytes at once: single bytes have no shifts. Joined before they are floats,
    # which v5e would unpack and pack again.
    bits = pltpu.bitcast(page, jnp.int32)
    both = jnp.concatenate([(bits << 4) & HIGH_BITS, bits & HIGH_BITS], axis=0 if turned(sizes) else 1)
    return pltpu.bitcast(both, jnp.int8).astype(dtype)


def _scale(sizes: ReadSizes, scale: Float[Array, "1 H"]) -> Float[Array, "1 H"]:
    """What ``_numbers`` of codes are multiplied by."""
    return scale if sizes.parts == 1 else scale / codes.TIMES


def _together(sizes: ReadSizes, coded: bool) -> int:
    """Pages that one product reads: of codes several where queries are few, since each page has a scale."""
    if not coded:
        return sizes.tile
    if sizes.rows > FEW_ROWS:
        return 1
    unit = next((n for name, n in MATRIX_UNIT.items() if lowering.kind().startswith(name)), 256)
    return math.gcd(sizes.tile, max(1, unit // sizes.slots))


def _some(sizes: ReadSizes, pages: Any, side: Array, first: int, many: int, dtype: Any) -> Array:
    """Pages as one matrix, [S, H], or [H, S] where pages are turned."""
    if turned(sizes):
        return jnp.concatenate([_numbers(sizes, pages[side, first + p], dtype) for p in range(many)], axis=1)
    some = pages[side, first : first + many].reshape(many * sizes.slots, sizes.part)
    return _numbers(sizes, some, dtype)


def scores(sizes: ReadSizes, q: Array, k: Any, scales: Any, side: Array, first: int) -> Float[Array, "R Y"]:
    """Capped scores of a tile; the scales of codes are folded into the queries."""
    product = tiles.product_nn if turned(sizes) else tiles.product_nt
    many = _together(sizes, scales is not None)

    def pages(first: int) -> Array:
        queries = q
        if scales is not None:  # once a page, one under the other
            wide = q.astype(jnp.float32)
            scaled = [wide * _scale(sizes, scales[side, first + p, 0:1]) for p in range(many)]
            queries = jnp.concatenate(scaled, axis=0).astype(q.dtype)
        s = product(queries, _some(sizes, k, side, first, many, q.dtype))
        return s if scales is None else _diagonal(sizes, s, many)

    s = jnp.concatenate([pages(first + p) for p in range(0, sizes.tile, many)], axis=1)
    return tiles.cap(s * sizes.options.scale, sizes.options.softcap)


def _diagonal(sizes: ReadSizes, s: Float[Array, "P*R S"], many: int) -> Float[Array, "R S"]:
    """Of rows once a page those of each slot's own page; the opposite of ``_blocks``.

            page 0   page 1
    rows 0  kept     -            -> rows    kept 0   kept 1
    rows 1  -        kept
    """
    kept, slot = s[: sizes.rows], jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, s.shape[1]), 1)
    for i in range(1, many):
        kept = jnp.where(slot >= i * sizes.slots, s[i * sizes.rows : (i + 1) * sizes.rows], kept)
    return kept


def _blocks(sizes: ReadSizes, p: Float[Array, "R S"], many: int) -> Float[Array, "P*R S"]:
    """Rows once a page with zeros for the slots of others, so that each page's sum is in rows of its own."""
    slot = jax.lax.broadcasted_iota(jnp.int32, p.shape, 1)
    after = [slot >= i * sizes.slots for i in range(1, many)]
    inside = zip([None, *after], [*after, None])
    rows = []
    for begun, over in inside:
        row = p if begun is None else jnp.where(begun, p, 0.0)
        rows.append(row if over is None else jnp.where(over, 0.0, row))
    return jnp.concatenate(rows, axis=0)


def mix(
    sizes: ReadSizes, p: Array, v: Any, scales: Any, side: Array, first: int, dtype: Any
) -> Float[Array, "R H"]:
    """A tile's values by their weights."""
    product = tiles.product_nt if turned(sizes) else tiles.product_nn
    many = _together(sizes, scales is not None)
    if scales is None:
        return product(p.astype(dtype), _some(sizes, v, side, first, many, dtype))
    out = jnp.zeros((p.shape[0], sizes.h), jnp.float32)
    for at in range(0, sizes.tile, many):
        blocks = _blocks(sizes, p[:, at * sizes.slots : (at + many) * sizes.slots], many)
        more = product(blocks.astype(dtype), _some(sizes, v, side, first + at, many, dtype))
        for i in range(many):
            own = more[i * sizes.rows : (i + 1) * sizes.rows]
            out += own * _scale(sizes, scales[side, first + at + i, 1:2])
    return out
