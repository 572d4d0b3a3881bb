"""vertical_slash on GPU: one program a block of queries, first over packed keys, then over its band.

Triton's tiles are powers of two: positions are padded to whole blocks and channels to the next power of
two, in HBM; at a head dim of 64, 128 or 256 and whole blocks only the packed keys are written.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tuning
from pallas_kernels import tiles as common
from pallas_kernels.padding import pad_to, round_up
from pallas_kernels.tuning import Blocks, Tuned
from pallas_kernels.vertical_slash import compact, tiles
from pallas_kernels.vertical_slash.compact import Compact, Inputs, Rows
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCKS = Blocks(q=64, k=64, warps=4, stages=2)
EXACT = Blocks(q=32, k=32, warps=4, stages=2)
"""Of float32, whose products are unrolled: larger ones spill registers."""


@functools.partial(jax.jit, static_argnames=("rule", "blocks", "interpret"))
def vertical_slash(
    x: Inputs, *, rule: Rule, blocks: Tuned | tuple[int, int] = (), interpret: Any = False
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    q, k, v, admit, lengths, _ = x
    (t, h), s, rows = q.shape[2:], k.shape[2], compact.rows_of(x)
    sizes = tuning.pick(blocks, "forward", k.dtype, h, EXACT if k.dtype.itemsize == 4 else BLOCKS)
    wide = max(16, pl.next_power_of_2(h))
    upto = compact.admitted_upto(admit, rows.end)
    v = v if lengths is None else compact.cleaned(v, rows.end)
    packed = compact.compact(k, v, upto, rule.capacity)
    cap = round_up(rule.capacity, sizes.k)
    pos = pad_to(packed.pos, cap, fill=compact.FAR)
    packed = Compact(pad_to(packed.k, cap, wide), pad_to(packed.v, cap, wide), pos)
    q = pad_to(q.astype(k.dtype), round_up(t, sizes.q), wide)
    numbers = _numbers(upto, rows, q.shape[2] // sizes.q, sizes.q, rule)
    k, v = (pad_to(x, round_up(s, sizes.k), wide) for x in (k, v))
    out, lse = _read([q, k, v], packed, rows, numbers, rule, sizes, interpret)
    # Rounded here: in the kernel it takes 208 registers instead of 168, two programs at a time, not three.
    return out[:, :, :t, :h].astype(rule.dtype), lse[:, :, :t], upto[..., -1]


def _numbers(upto: Array, rows: Rows, blocks: int, size: int, rule: Rule) -> Int[Array, "B K I X"]:
    """For a block of queries: packed keys that some see, that all see; 1 if the KV head's keys do not fit."""
    numbers = [*compact.older(upto, rows, blocks, size, rule.window, rule.capacity)]
    full = compact.lost(upto, rule.capacity)
    if full is not None:
        numbers.append(jnp.broadcast_to(full[..., None], numbers[0].shape).astype(jnp.int32))
    return jnp.stack(numbers, axis=-1)


def _read(
    qkv: list[Array], packed: Compact, rows: Rows, counts: Array, rule: Rule, blocks: Blocks, interpret: Any
) -> tuple[Array, Array]:
    q, k, v = qkv
    (b, n, t, h), (_, heads, s, _), (bq, bk, *_), cap = q.shape, k.shape, blocks, packed.pos.shape[2]

    def body(*refs: Any) -> None:
        row, count, q, k, v, packed_k, packed_v, pos, out, lse = refs
        start, length, q_i = row[0] + pl.program_id(0) * bq, row[1], q[...]
        # A second loop beside heads of 256 spills registers: of those every block is taken as an edge.
        some, whole = (count[0] + bk - 1) // bk, count[1] // bk if h <= 128 else 0
        reach = tiles.reach(start + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0), length, rule)

        def vertical(c: Array, stats: common.Stats, *, edge: bool) -> common.Stats:
            at = pl.ds(c * bk, bk)
            see = tiles.vertical(reach, pos[at][None, :]) if edge else None
            return tiles.grow(stats, q_i, packed_k[at, :], packed_v[at, :], see, rule)

        def band(c: Array, stats: common.Stats) -> common.Stats:
            at = pl.ds(c * bk, bk)
            j = c * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1)
            return tiles.grow(stats, q_i, k[at, :], v[at, :], tiles.band(reach, j), rule)

        inner, outer = (functools.partial(vertical, edge=edge) for edge in (False, True))
        stats = common.start(bq, h)
        stats = jax.lax.fori_loop(0, whole, inner, stats) if h <= 128 else stats
        stats = jax.lax.fori_loop(whole, some, outer, stats)
        stop = (jnp.minimum(start + bq, length) + bk - 1) // bk
        first = jnp.maximum(start - rule.window + 1, 0) // bk
        if rule.window:
            stats = jax.lax.fori_loop(first, jnp.maximum(stop, first), band, stats)
        result, column = common.finish(stats)
        if count.shape[0] > 2:
            full = count[2] > 0
            result, column = (jnp.where(full, jnp.full_like(x, jnp.nan), x) for x in (result, column))
        out[...] = result
        lse[...] = column.reshape(bq)

    group = n // heads
    blocked = pl.BlockSpec((None, None, bq, h), lambda i, n, b: (b, n, i, 0))
    keys, gathered = (
        pl.BlockSpec((None, None, size, h), lambda i, n, b: (b, n // group, 0, 0)) for size in (s, cap)
    )
    moved = sum(x.size * x.dtype.itemsize for x in (q, k, v, *packed)) + 4 * q.size
    pairs = b * n * t * compact.expected(t, s, rule.window, cap)
    return pl.pallas_call(
        body,
        grid=(t // bq, n, b),
        in_specs=[
            pl.BlockSpec((None, 2), lambda i, n, b: (b, 0)),
            pl.BlockSpec((None, None, None, counts.shape[3]), lambda i, n, b: (b, n // group, i, 0)),
            blocked,
            keys,
            keys,
            gathered,
            gathered,
            pl.BlockSpec((None, None, cap), lambda i, n, b: (b, n // group, 0)),
        ],
        out_specs=[blocked, pl.BlockSpec((None, None, bq), lambda i, n, b: (b, n, i))],
        out_shape=[
            jax.ShapeDtypeStruct((b, n, t, h), jnp.float32),
            jax.ShapeDtypeStruct((b, n, t), jnp.float32),
        ],
        compiler_params=compat.triton_params(warps=blocks.warps, stages=blocks.stages),
        cost_estimate=pl.CostEstimate(flops=4 * pairs * h, transcendentals=pairs, bytes_accessed=moved),
        interpret=interpret,
        name="vertical_slash",
    )(jnp.stack(rows, axis=1), counts, q, k, v, *packed)
