"""vertical_slash on TPU: a program a block of queries of one stream, which fetches just the keys it needs.

The query heads of a KV head are rows of one tile, so each key is read once. Keys stay in HBM; a program
goes through its packed blocks and then its band, the next block on its way while one is read.
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
from pallas_kernels.vertical_slash import tiles
from pallas_kernels.vertical_slash.compact import FAR, compact_and_clean, loudly, older
from pallas_kernels.vertical_slash.tiles import Rule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from pallas_kernels.tuning import Tuned

ROWS = 512
"""Queries of a tile, all heads of the group together; at least 128 positions."""

BLOCK_K = 512
LANES = 128


class Plan(NamedTuple):
    """Static sizes of a call; t and cap are multiples of the blocks, bq is a power of two."""

    b: int
    heads: int
    group: int
    t: int
    h: int
    cap: int
    bq: int
    bk: int
    rule: Rule
    interpret: Any

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.group * self.bq


def _up(x: int, size: int) -> int:
    return -(-x // size) * size


def _plan(q: Array, k: Array, blocks: Tuned | tuple[int, int], rule: Rule, interpret: Any) -> Plan:
    (b, n, t, h), heads = q.shape, k.shape[1]
    longest = _up(t, LANES)
    bq = LANES
    while 2 * bq * n // heads <= ROWS and 2 * bq <= longest:
        bq *= 2
    found = tuning.pick(blocks, "forward", k.dtype, h, tuning.Blocks(q=bq, k=BLOCK_K))
    bq, bk = found.q, min(found.k, longest)
    # Lengths that are multiples of both: bq is a power of two times LANES, bk a multiple of LANES.
    whole = _up(t, bq * bk // LANES) if bk % bq else _up(t, bk)
    return Plan(b, heads, n // heads, whole, h, _up(rule.capacity, bk), bq, bk, rule, interpret)


class Fetch(NamedTuple):
    """The keys of one program: its packed blocks first, then the blocks of its band."""

    own: tuple[Any, ...]
    packed: tuple[Any, ...]
    buffers: tuple[Any, ...]
    sem: Any
    stream: tuple[Array, Array]
    vertical: Array
    first: Array
    size: int

    def _copies(self, sources: tuple[Any, ...], block: Array, side: Array) -> list[Any]:
        at = pl.ds(pl.multiple_of(block * self.size, self.size), self.size)
        slices = [
            (*self.stream, at, slice(None)),
            (*self.stream, at, slice(None)),
            (*self.stream, slice(None), at),
        ]
        return [
            pltpu.make_async_copy(source.at[where], buffer.at[side], self.sem.at[side])
            for source, where, buffer in zip(sources, slices, self.buffers)
        ]

    def _each(self, c: Array, side: Array, act: str) -> None:
        @pl.when(c < self.vertical)
        def _() -> None:
            for copy in self._copies(self.packed, c, side):
                getattr(copy, act)()

        @pl.when(c >= self.vertical)
        def _() -> None:
            for copy in self._copies(self.own, self.first + c - self.vertical, side):
                getattr(copy, act)()

    def begin(self, c: Array, side: Array) -> None:
        """Start the copies of block c."""
        self._each(c, side, "start")

    def end(self, c: Array, side: Array) -> None:
        """Wait for the copies of block c."""
        self._each(c, side, "wait")


def _body(plan: Plan) -> Any:
    bq, bk, rule = plan.bq, plan.bk, plan.rule

    def body(ends: Any, counts: Any, q: Any, *refs: Any) -> None:
        k, v, packed_k, packed_v, pos, out, lse, k_now, v_now, pos_now, sem, m, l, o = refs
        b, kv, block = (pl.program_id(axis) for axis in range(3))
        start, length = block * bq, ends[b]
        programs = plan.t // bq
        vertical = (counts[(b * plan.heads + kv) * programs + block] + bk - 1) // bk
        first = jnp.maximum(start - rule.window + 1, 0) // bk
        stop = (jnp.minimum(start + bq, length) + bk - 1) // bk
        steps = vertical + (jnp.where(start < length, stop - first, 0) if rule.window else 0)
        buffers = (k_now, v_now, pos_now)
        fetch = Fetch((k, v), (packed_k, packed_v, pos), buffers, sem, (b, kv), vertical, first, bk)

        @pl.when(steps > 0)
        def _() -> None:
            fetch.begin(jnp.int32(0), jnp.int32(0))

        m[...] = jnp.full_like(m, common.HIDDEN)
        l[...] = jnp.zeros_like(l)
        o[...] = jnp.zeros_like(o)
        rows = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, LANES), 0) & (bq - 1)
        found = tiles.reach(start + rows, length, rule)

        def step(c: Array, carry: Array) -> Array:
            side = jax.lax.rem(c, 2)

            @pl.when(c + 1 < steps)
            def _() -> None:
                fetch.begin(c + 1, 1 - side)

            fetch.end(c, side)
            own = (first + c - vertical) * bk + jax.lax.broadcasted_iota(jnp.int32, (1, bk), 1)
            packed = c < vertical
            see = tiles.either(found, packed, jnp.where(packed, pos_now[side], own))
            stats = (m[...], l[...], o[...])
            wide = q[...].reshape(plan.rows, plan.h)
            m[...], l[...], o[...] = tiles.grow(stats, wide, k_now[side], v_now[side], see, rule)
            return carry

        jax.lax.fori_loop(0, steps, step, jnp.int32(0))
        result, column = common.finish((m[:, :1], l[:, :1], o[...]))
        out[...] = result.reshape(plan.group, bq, plan.h)
        for g in range(plan.group):
            mine = jnp.broadcast_to(column[g * bq : (g + 1) * bq], (bq, LANES))
            lse[g : g + 1] = jnp.transpose(mine)[:1]

    return body


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
    (b, n, t, _), plan = q.shape, _plan(q, k, blocks, rule, interpret)
    packed, v, ends = compact_and_clean(k, v, admit, capacity=rule.capacity, lengths=lengths)
    ours = [_padded(x, plan.t) for x in (q.astype(k.dtype), k, v)]
    theirs = [_padded(x, plan.cap) for x in packed[:2]]
    pos = _padded(packed.pos, plan.cap, FAR)[:, :, None]
    counts = older(packed.pos, ends, plan.t // plan.bq, plan.bq, rule.window)
    out, lse = _read(plan, ends, counts.reshape(-1), *ours, *theirs, pos)
    out, lse = (x.reshape(b, n, *x.shape[3:])[:, :, :t] for x in (out, lse))
    return loudly(out, lse, packed.admitted, rule.capacity)


def _padded(x: Array, t: int, fill: int = 0) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, t - x.shape[2]), *[(0, 0)] * (x.ndim - 3)], constant_values=fill)


def _read(plan: Plan, ends: Array, counts: Array, q: Array, *keys: Array) -> tuple[Array, Array]:
    lead = (plan.b, plan.heads, plan.group, plan.t)
    wide = pl.BlockSpec((None, None, plan.group, plan.bq, plan.h), lambda b, k, i, *_: (b, k, 0, i, 0))
    row = pl.BlockSpec((None, None, plan.group, plan.bq), lambda b, k, i, *_: (b, k, 0, i))
    pairs = plan.b * plan.heads * plan.group * plan.t * min(plan.t, plan.rule.window + plan.cap // 2)
    dtype, programs = keys[0].dtype, plan.b * plan.heads * plan.t // plan.bq
    # Keys of a program: its band, and half of the packed ones.
    each = min(plan.t, plan.rule.window + plan.bq + plan.cap // 2)
    moved = programs * each * (2 * plan.h * dtype.itemsize + 4) + q.size * (q.dtype.itemsize + 4)
    return pl.pallas_call(
        _body(plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.b, plan.heads, plan.t // plan.bq),
            in_specs=[wide] + [pl.BlockSpec(memory_space=pl.ANY)] * len(keys),
            out_specs=[wide, row],
            scratch_shapes=[
                pltpu.VMEM((2, plan.bk, plan.h), dtype),
                pltpu.VMEM((2, plan.bk, plan.h), dtype),
                pltpu.VMEM((2, 1, plan.bk), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, plan.h), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*lead, plan.h), jnp.float32),
            jax.ShapeDtypeStruct(lead, jnp.float32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=4 * pairs * plan.h, transcendentals=pairs, bytes_accessed=moved),
        interpret=plan.interpret,
        name="vertical_slash",
    )(ends, counts, q.reshape(*lead, plan.h), *keys)
