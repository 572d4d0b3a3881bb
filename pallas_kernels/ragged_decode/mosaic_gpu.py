"""ragged_decode on Hopper (H100, H200), in Pallas' Mosaic GPU: what is left when Pallas' Triton is gone.

Two kernels a call: ``mosaic_gpu_read`` reads the pages, an item of a list a program, ``mosaic_gpu_join``
joins the items of each KV head. Before them XLA rounds, splits and pads the queries in one more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, softmax, tuning
from pallas_kernels.hopper import ROWS
from pallas_kernels.ragged_decode import mosaic_gpu_join, mosaic_gpu_read
from pallas_kernels.ragged_decode.call import Lists, Options, Pools
from pallas_kernels.ragged_decode.mosaic_gpu_sizes import TILE, HopperSizes, buffers
from pallas_kernels.ragged_decode.ref import live_slots, page_lists
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ITEM_SLOTS = (1024, 128)
"""Slots of an item: at most, and at least."""

PROGRAMS = 264
"""Items are made smaller until there are this many: two a multiprocessor, which runs one at a time."""

STAGES = 16
"""Buffers of the ring, if so many fit."""

DTYPES = ("bfloat16", "int8", "float32")

HEAD_DIMS = (64, 128)


def _refuse(q: Array, pools: Pools, lists: Lists, options: Options, interpret: Any) -> None:
    size, h, dtype = pools.k.shape[1], q.shape[-1], pools.k.dtype
    many = q.shape[2] > 1 or q.shape[1] // lists.table.shape[1] > ROWS
    odd, large = size < 8 or size & (size - 1) != 0, pools.k.size >= 1 << 31
    reasons = {
        f"pools of {dtype}; the body reads {', '.join(DTYPES)}": dtype.name not in DTYPES,
        f"head dim {h}; the body's tiles have 64 or 128 channels": h not in HEAD_DIMS,
        f"pages of {size} slots; the body's tiles are made of powers of two from 8 on": odd,
        f"a pool of {pools.k.size} elements; more than 31 bits of them were never compiled": large,
        "selected pages; the body reads whole lists": lists.pages is not None,
        f"mass of {q.shape[2]} queries a head; the body keeps the scores of one": options.mass and many,
    }
    hopper.refuse("ragged_decode", interpret, reasons)


def _sizes(
    q: Array, pools: Pools, lists: Lists, options: Options, interpret: Any, blocks: Tuned
) -> HopperSizes:
    _refuse(q, pools, lists, options, interpret)
    (b, n, t, h), (pool, size, _), (_, heads, m) = q.shape, pools.k.shape, lists.table.shape
    total, dtype, codes = n // heads * t, pools.k.dtype, pools.scales is not None
    terms = 3 if dtype == jnp.float32 or (codes and q.dtype == jnp.float32) else 1
    readers, many = (1 if terms > 1 else 2), -(-total // ROWS)
    own = tuning.Blocks(item=ITEM_SLOTS[0], stages=STAGES)
    chosen = tuning.pick(blocks, "read", dtype, h, own)
    item = chosen.item
    while item > ITEM_SLOTS[1] and b * heads * many * -(-m * size // item) < PROGRAMS:
        item //= 2
    rows = min(ROWS, -(-total // 8) * 8)
    sizes = HopperSizes(
        total, rows, many, h, pool, size, m, max(item // TILE, readers), readers,
        max(chosen.stages, 2 * readers), terms, codes, options, interpret or None,
    )  # fmt: skip
    return sizes._replace(stages=buffers(sizes, dtype.itemsize))


def _in_terms(q: Float[Array, "Z R H"], terms: int) -> Float[Array, "terms Z R H"]:
    """As ``mosaic_gpu_sizes.in_terms``; XLA would keep float32 between conversions."""
    x, parts = q.astype(jnp.float32), []
    for _ in range(terms):
        parts.append(jax.lax.reduce_precision(x, 8, 7))
        x = x - parts[-1]
    return jnp.stack(parts).astype(jnp.bfloat16)


def _mass(
    sizes: HopperSizes, scores: Float[Array, "X I R L"], lse: Float[Array, "B N 1"], lists: Lists
) -> Float[Array, "B N M S"]:
    """Attention that slots received, from the scores of all items, whatever lies in those of dead slots."""
    (b, heads, m), groups = lists.table.shape, sizes.total
    by_slot = scores[:, :, :groups].swapaxes(1, 2).reshape(b * heads, groups, -1)
    by_slot = by_slot[..., : m * sizes.slots].reshape(b, heads, groups, m, sizes.slots)
    see = live_slots(page_lists(lists, sizes.pool, sizes.slots)[1], None, sizes.slots)[:, :, None]
    shift = lse.reshape(b, heads, groups, 1, 1)
    return softmax.probabilities(by_slot, see, shift[..., 0]).reshape(b, heads * groups, m, sizes.slots)


@functools.partial(jax.jit, static_argnames=("options", "interpret", "blocks"))
def ragged_decode(
    q: Array, pools: Pools, lists: Lists, *, options: Options, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Array, ...]:
    """See ``api.ragged_decode``."""
    sizes = _sizes(q, pools, lists, options, interpret, blocks)
    (b, n, t, h), kv_heads = q.shape, lists.length.size
    more = sizes.blocks * sizes.rows - sizes.total
    rows = jnp.pad(q.reshape(kv_heads, sizes.total, h), ((0, 0), (0, more), (0, 0)))
    rows = _in_terms(rows.reshape(-1, sizes.rows, h), sizes.terms)
    length = lists.length.reshape(kv_heads)
    arrays = [pools.k, pools.v, lists.table.reshape(kv_heads, -1), length]
    arrays += [] if pools.scales is None else [pools.scales]
    o, stats, *scores = mosaic_gpu_read.read(sizes, rows, arrays)
    out, lse = mosaic_gpu_join.join(sizes, o, stats, length)
    out = out.reshape(kv_heads, -1, h)[:, : sizes.total].reshape(b, n, t, h)
    lse = lse.reshape(kv_heads, -1)[:, : sizes.total].reshape(b, n, t)
    return (out, lse, _mass(sizes, scores[0], lse, lists)) if options.mass else (out, lse)
