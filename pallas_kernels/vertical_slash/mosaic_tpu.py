"""vertical_slash on TPU: a program a block of queries of one KV head, which fetches just the keys it needs.

The query heads of a KV head are rows of one tile, so each key is read once. Keys stay in HBM; a program
goes through the blocks that all its queries see whole, without any mask, and then through those at the edges,
the next block on its way while one is read.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tuning
from pallas_kernels import tiles as common
from pallas_kernels.padding import pad_to, round_up
from pallas_kernels.tuning import Tuned
from pallas_kernels.vertical_slash import tiles
from pallas_kernels.vertical_slash.compact import (
    Inputs,
    admitted_upto,
    cleaned,
    expected,
    lost,
    older,
    rows_of,
)
from pallas_kernels.vertical_slash.mosaic_tpu_pack import compact
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

ROWS = 512
"""Queries of a tile, all heads of the group together; at least 128 positions."""

BLOCK_K = 512
LANES = 128


class SlashSizes(NamedTuple):
    """Static sizes of a call: queries t, keys s and cap are multiples of the blocks, bq is a power of two."""

    b: int
    heads: int
    group: int
    t: int
    s: int
    h: int
    cap: int
    bq: int
    bk: int
    rule: Rule
    interpret: Any

    loud: bool
    """Whether a KV head may admit more than fits."""

    @property
    def rows(self) -> int:
        return self.group * self.bq


def _sizes(q: Array, k: Array, blocks: Tuned | tuple[int, int], rule: Rule, interpret: Any) -> SlashSizes:
    (b, n, t, h), heads, s = q.shape, k.shape[1], k.shape[2]
    longest = round_up(t, LANES)
    bq = LANES
    while 2 * bq * n // heads <= ROWS and 2 * bq <= longest:
        bq *= 2
    chosen = tuning.pick(blocks, "forward", k.dtype, h, tuning.Blocks(q=bq, k=BLOCK_K))
    bq, bk = chosen.q, min(chosen.k, round_up(s, LANES))
    cap = round_up(rule.capacity, bk)
    return SlashSizes(
        b,
        heads,
        n // heads,
        round_up(t, bq),
        round_up(s, bk),
        h,
        cap,
        bq,
        bk,
        rule,
        interpret,
        rule.capacity < s,
    )


class BlockOrder(NamedTuple):
    """The blocks of keys that a program reads, in its order: seen whole, packed and own, then the edges.

    Attributes:
      whole_packed: packed blocks that all queries see whole: the first ones.
      packed: packed blocks that any query sees.
      first: the row's own block with which the band begins.
      inner: the own block with which those begin that all queries see whole.
      whole_own: how many these are.
      own: blocks of the band.
    """

    whole_packed: Array
    packed: Array
    first: Array
    inner: Array
    whole_own: Array
    own: Array

    @property
    def wholes(self) -> Array:
        """Blocks that need no mask."""
        return self.whole_packed + self.whole_own

    @property
    def steps(self) -> Array:
        return self.packed + self.own

    def block(self, c: Array) -> tuple[Array, Array]:
        """(whether the c-th block is a packed one, its number among those of its kind)."""
        edge = c - self.wholes
        packed_edges = self.packed - self.whole_packed
        edge_own = self.first + edge - packed_edges
        edge_own = edge_own + jnp.where(edge_own >= self.inner, self.whole_own, 0)
        at_edge = edge >= 0
        packed = jnp.where(at_edge, edge < packed_edges, c < self.whole_packed)
        own = jnp.where(at_edge, edge_own, self.inner + c - self.whole_packed)
        return packed, jnp.where(packed, jnp.where(at_edge, self.whole_packed + edge, c), own)


def block_order(sizes: SlashSizes, start: Array, length: Array, some: Array, whole: Array) -> BlockOrder:
    """The blocks of the queries from ``start`` on; ``some`` and ``whole`` as in ``compact.Older``."""
    bq, bk, window = sizes.bq, sizes.bk, sizes.rule.window
    packed, zero = (some + bk - 1) // bk, jnp.int32(0)
    if window == 0:
        return BlockOrder(whole // bk, packed, zero, zero, zero, zero)
    first = jnp.maximum(start - window + 1, 0) // bk
    stop = (jnp.minimum(start + bq, length) + bk - 1) // bk
    # In the window of the last query, and not after the first.
    inner = (jnp.maximum(start + bq - window, 0) + bk - 1) // bk
    inside = jnp.where(start + bq <= length, jnp.maximum((start + 1) // bk - inner, 0), 0)
    own = jnp.where(start < length, stop - first, 0)
    return BlockOrder(whole // bk, packed, first, inner, inside, own)


class Fetch(NamedTuple):
    """The keys of one program, block after block."""

    own: tuple[Any, ...]
    packed: tuple[Any, ...]
    buffers: tuple[Any, ...]
    sem: Any
    kv_head: tuple[Array, Array]
    order: BlockOrder
    size: int

    def _copies(self, sources: tuple[Any, ...], block: Array, side: Array) -> list[Any]:
        at = pl.ds(pl.multiple_of(block * self.size, self.size), self.size)
        slices = [
            (*self.kv_head, at, slice(None)),
            (*self.kv_head, at, slice(None)),
            (*self.kv_head, slice(None), at),
        ]
        return [
            pltpu.make_async_copy(source.at[where], buffer.at[side], self.sem.at[side])
            for source, where, buffer in zip(sources, slices, self.buffers)
        ]

    def copies(self, c: Array, side: Array, act: str) -> None:
        """Start the copies of the c-th block, or wait for them."""
        packed, block = self.order.block(c)

        @pl.when(packed)
        def _() -> None:
            for copy in self._copies(self.packed, block, side):
                getattr(copy, act)()

        @pl.when(jnp.logical_not(packed))
        def _() -> None:
            for copy in self._copies(self.own, block, side):
                getattr(copy, act)()


def _body(sizes: SlashSizes) -> Any:
    bq, bk, rule = sizes.bq, sizes.bk, sizes.rule

    def body(rows: Any, counts: Any, q: Any, *refs: Any) -> None:
        k, v, packed_k, packed_v, pos, out, lse, k_now, v_now, pos_now, sem, m, l, o = refs
        b, kv, block = (pl.program_id(axis) for axis in range(3))
        start, length, programs = rows[b] + block * bq, rows[sizes.b + b], sizes.t // bq
        kv_head, kv_heads = b * sizes.heads + kv, sizes.b * sizes.heads
        at = kv_head * programs + block
        order = block_order(sizes, start, length, counts[at], counts[kv_heads * programs + at])
        buffers = (k_now, v_now, pos_now)
        fetch = Fetch((k, v), (packed_k, packed_v, pos), buffers, sem, (b, kv), order, bk)

        @pl.when(order.steps > 0)
        def _() -> None:
            fetch.copies(jnp.int32(0), jnp.int32(0), "start")

        m[...] = jnp.full_like(m, common.HIDDEN)
        l[...] = jnp.zeros_like(l)
        o[...] = jnp.zeros_like(o)

        def visible(c: Array, side: Array, reach: tiles.Reach) -> Array:
            packed, block = order.block(c)
            own = block * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1)
            return tiles.either(reach, packed, jnp.where(packed, pos_now[side], own))

        def step(c: Array, carry: Array, *, reach: tiles.Reach | None) -> Array:
            side = jax.lax.rem(c, 2)

            @pl.when(c + 1 < order.steps)
            def _() -> None:
                fetch.copies(c + 1, 1 - side, "start")

            fetch.copies(c, side, "wait")
            see = None if reach is None else visible(c, side, reach)
            stats = (m[...], l[...], o[...])
            wide = q[...].reshape(sizes.rows, sizes.h)
            m[...], l[...], o[...] = tiles.grow(stats, wide, k_now[side], v_now[side], see, rule)
            return carry

        jax.lax.fori_loop(0, order.wholes, functools.partial(step, reach=None), jnp.int32(0))
        row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 0) & (bq - 1)
        edges = functools.partial(step, reach=tiles.reach(start + row, length, rule))
        jax.lax.fori_loop(order.wholes, order.steps, edges, jnp.int32(0))
        result, lanes = common.finish((m[...], l[...], o[...]))
        if sizes.loud:
            factor = jnp.where(counts[2 * kv_heads * programs + kv_head] > 0, jnp.nan, 1.0)
            result, lanes = result * factor, lanes * factor
        out[...] = result.reshape(sizes.group, bq, sizes.h).astype(out.dtype)
        for g in range(sizes.group):
            lse[g : g + 1] = jnp.transpose(lanes[g * bq : (g + 1) * bq])[:1]

    return body


@functools.partial(jax.jit, static_argnames=("rule", "blocks", "interpret"))
def vertical_slash(
    x: Inputs, *, rule: Rule, blocks: Tuned | tuple[int, int] = (), interpret: Any = False
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Int[Array, "B K"]]:
    """See ``api.vertical_slash``."""
    q, k, v, admit, lengths, _ = x
    (b, n, t, h), sizes, rows = q.shape, _sizes(q, k, blocks, rule, interpret), rows_of(x)
    if interpret is False:
        compat.check_lanes("vertical_slash", h)
    upto = admitted_upto(admit, rows.end)
    v = v if lengths is None else cleaned(v, rows.end)
    k, v = (pad_to(x, sizes.s) for x in (k, v))
    places = jnp.pad(upto, ((0, 0), (0, 0), (0, sizes.s - upto.shape[2])), mode="edge")
    packed = compact(k, v, places, capacity=sizes.cap, block=sizes.bk, interpret=interpret)
    counts = older(upto, rows, sizes.t // sizes.bq, sizes.bq, rule.window, rule.capacity)
    full = lost(upto, rule.capacity)
    numbers = [x.reshape(-1) for x in (*counts, *(() if full is None else (full.astype(jnp.int32),)))]
    wide = pad_to(q.astype(k.dtype), sizes.t)
    out, lse = _read(sizes, jnp.concatenate(rows), jnp.concatenate(numbers), wide, k, v, *packed)
    out, lse = (x.reshape(b, n, *x.shape[3:])[:, :, :t] for x in (out, lse))
    return out, lse, upto[..., -1]


def _read(sizes: SlashSizes, rows: Array, counts: Array, q: Array, *keys: Array) -> tuple[Array, Array]:
    lead = (sizes.b, sizes.heads, sizes.group, sizes.t)
    wide = pl.BlockSpec((None, None, sizes.group, sizes.bq, sizes.h), lambda b, k, i, *_: (b, k, 0, i, 0))
    row = pl.BlockSpec((None, None, sizes.group, sizes.bq), lambda b, k, i, *_: (b, k, 0, i))
    seen = expected(sizes.t, sizes.s, sizes.rule.window, sizes.cap)
    pairs = sizes.b * sizes.heads * sizes.group * sizes.t * seen
    dtype, programs = keys[0].dtype, sizes.b * sizes.heads * sizes.t // sizes.bq
    each = min(sizes.s, seen + sizes.bq)
    moved = programs * each * (2 * sizes.h * dtype.itemsize + 4)
    moved += q.size * (q.dtype.itemsize + sizes.rule.dtype.itemsize)
    return pl.pallas_call(
        _body(sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sizes.b, sizes.heads, sizes.t // sizes.bq),
            in_specs=[wide] + [pl.BlockSpec(memory_space=pl.ANY)] * len(keys),
            out_specs=[wide, row],
            scratch_shapes=[
                pltpu.VMEM((2, sizes.bk, sizes.h), dtype),
                pltpu.VMEM((2, sizes.bk, sizes.h), dtype),
                pltpu.VMEM((2, 1, sizes.bk), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((sizes.rows, LANES), jnp.float32),
                pltpu.VMEM((sizes.rows, LANES), jnp.float32),
                pltpu.VMEM((sizes.rows, sizes.h), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*lead, sizes.h), sizes.rule.dtype),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=4 * pairs * sizes.h, transcendentals=pairs, bytes_accessed=moved),
        interpret=sizes.interpret,
        name="vertical_slash",
    )(rows, counts, q.reshape(*lead, sizes.h), *keys)
