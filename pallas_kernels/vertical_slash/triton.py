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
from pallas_kernels.tuning import Blocks
from pallas_kernels.vertical_slash import tiles
from pallas_kernels.vertical_slash.compact import FAR, Compact, compact_and_clean, loudly, older
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from pallas_kernels.tuning import Tuned

BLOCKS = Blocks(q=64, k=64, warps=4, stages=2)
EXACT = Blocks(q=32, k=32, warps=4, stages=2)
"""Of float32, whose products are unrolled: larger ones spill registers."""


def _padded(x: Array, t: int, h: int, fill: int = 0) -> Array:
    wide = [(0, h - x.shape[3])] if x.ndim == 4 else []
    return jnp.pad(x, [(0, 0), (0, 0), (0, t - x.shape[2]), *wide], constant_values=fill)


@functools.partial(jax.jit, static_argnames=("rule", "blocks", "interpret"))
def vertical_slash(
    q: Array,
    k: Array,
    v: Array,
    admit: Array,
    lengths: Array | None,
    *,
    rule: Rule,
    blocks: Tuned | tuple[int, int] = (),
    interpret: Any = False,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    t, h = q.shape[2:]
    sizes = tuning.pick(blocks, "forward", k.dtype, h, EXACT if k.dtype.itemsize == 4 else BLOCKS)
    size = max(sizes.q, sizes.k)
    wide = max(16, pl.next_power_of_2(h))
    packed, v, ends = compact_and_clean(k, v, admit, capacity=rule.capacity, lengths=lengths)
    whole, cap = -(-t // size) * size, -(-rule.capacity // size) * size
    padded = functools.partial(_padded, t=whole, h=wide)
    theirs = packed._replace(
        k=_padded(packed.k, cap, wide),
        v=_padded(packed.v, cap, wide),
        pos=_padded(packed.pos, cap, wide, FAR),
    )
    out, lse = _read(padded(q.astype(k.dtype)), padded(k), padded(v), theirs, ends, rule, sizes, interpret)
    return loudly(out[:, :, :t, :h], lse[:, :, :t], packed.admitted, rule.capacity)


def _read(
    q: Array, k: Array, v: Array, packed: Compact, ends: Array, rule: Rule, blocks: Blocks, interpret: Any
) -> tuple[Array, Array]:
    (b, n, t, h), heads, (bq, bk, *_), cap = q.shape, k.shape[1], blocks, packed.pos.shape[2]
    counts = jnp.stack(older(packed.pos, ends, t // bq, bq, rule.window), axis=-1)

    def body(
        ends: Any,
        counts: Any,
        q: Any,
        k: Any,
        v: Any,
        packed_k: Any,
        packed_v: Any,
        pos: Any,
        out: Any,
        lse: Any,
    ) -> None:
        start, length, q_i = pl.program_id(0) * bq, ends[0], q[...]
        # A second loop beside heads of 256 spills registers: of those every block is taken as an edge.
        some, whole = (counts[0] + bk - 1) // bk, counts[1] // bk if h <= 128 else 0
        found = tiles.reach(start + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0), length, rule)

        def vertical(c: Array, stats: common.Stats, *, edge: bool) -> common.Stats:
            at = pl.ds(c * bk, bk)
            see = tiles.vertical(found, pos[at][None, :]) if edge else None
            return tiles.grow(stats, q_i, packed_k[at, :], packed_v[at, :], see, rule)

        def band(c: Array, stats: common.Stats) -> common.Stats:
            at = pl.ds(c * bk, bk)
            j = c * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1)
            return tiles.grow(stats, q_i, k[at, :], v[at, :], tiles.band(found, j), rule)

        inner, outer = (functools.partial(vertical, edge=edge) for edge in (False, True))
        stats = common.start(bq, h)
        stats = jax.lax.fori_loop(0, whole, inner, stats) if h <= 128 else stats
        stats = jax.lax.fori_loop(whole, some, outer, stats)
        stop = (jnp.minimum(start + bq, length) + bk - 1) // bk
        first = jnp.maximum(start - rule.window + 1, 0) // bk
        if rule.window:
            stats = jax.lax.fori_loop(first, jnp.maximum(stop, first), band, stats)
        out[...], column = common.finish(stats)
        lse[...] = column.reshape(bq)

    def stream(i: Array, n: Array, b: Array) -> tuple[Any, ...]:
        return b, n // (q.shape[1] // heads), 0, 0

    blocked = pl.BlockSpec((None, None, bq, h), lambda i, n, b: (b, n, i, 0))
    keys, gathered = (pl.BlockSpec((None, None, size, h), stream) for size in (t, cap))
    moved = sum(x.size * x.dtype.itemsize for x in (q, k, v, *packed)) + 4 * q.size
    pairs = b * n * t * min(t, rule.window + cap // 2)
    return pl.pallas_call(
        body,
        grid=(t // bq, n, b),
        in_specs=[
            pl.BlockSpec((None, 1), lambda i, n, b: (b, 0)),
            pl.BlockSpec((None, None, None, 2), lambda i, n, b: (b, stream(i, n, b)[1], i, 0)),
            blocked,
            keys,
            keys,
            gathered,
            gathered,
            pl.BlockSpec((None, None, cap), lambda *at: stream(*at)[:3]),
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
    )(ends[:, None], counts, q, k, v, *packed[:3])
