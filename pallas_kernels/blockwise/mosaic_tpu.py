"""blockwise and column_mass on TPU: a grid whose inner axis follows the listed blocks.

Blocks come and go by Pallas' own pipeline. Steps past the end of a list ask for the block that is
there already, so they move nothing. What is a row in memory (positions, lse) and is needed as a
column is transposed once an outer block and kept in VMEM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise import tiles as block_tiles
from pallas_kernels.blockwise.sight import Partial, Sight, Where
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.padding import pad_to_multiple, round_up
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

LANES = 128
BLOCK = 512
SMEM_WORDS = 230_000

Spec = tuple["Array | jax.ShapeDtypeStruct", str, int]
"""An operand [B, heads, 1 or length, ...], the side of the grid it follows, and its block's length."""


def sizes(blocks: Tuned, what: str, rows: int, k: Float[Array, "B K S H"]) -> tuple[int, int]:
    """Lengths of blocks of queries and of keys: whole tiles of 8 and 128."""
    chosen = tuning.pick(blocks, what, k.dtype, k.shape[3], tuning.Blocks(q=BLOCK, k=BLOCK))
    return min(chosen.q, round_up(rows, 8)), min(chosen.k, round_up(k.shape[2], LANES))


class Grid(NamedTuple):
    """Rows, heads, outer blocks, and the list of inner blocks of each."""

    b: int
    heads: int
    lists: block_lists.BlockLists
    interpret: Any

    def spec(self, operand: Spec) -> pl.BlockSpec:
        """The block of an operand at a step of the grid."""
        x, side, length = operand
        per, flat = self.heads // x.shape[1], x.shape[2] == 1

        def at(b: Array, a: Array, i: Array, j: Array, order: Any, count: Any, *_: Any) -> tuple[Any, ...]:
            block = i if side == "outer" else self.listed(b, a, i, j, order, count)
            head = a if per == 1 else jax.lax.div(a, per)
            return (b, head, 0, block) if flat else (b, head, block, 0)

        return pl.BlockSpec((None, None, 1, length) if flat else (None, None, length, x.shape[3]), at)

    def list_of(self, b: Array, a: Array, i: Array) -> Array:
        """Number of the list of outer block i of head a."""
        outer, shared = self.lists.order.shape[2], self.lists.heads
        head = jax.lax.div(a, self.heads // shared) if shared > 1 else 0
        return (b * shared + head) * outer + i

    def listed(self, b: Array, a: Array, i: Array, j: Array, order: Any, count: Any) -> Array:
        """The inner block of step j; past the end of the list, its last one."""
        inner, which = self.lists.order.shape[3], self.list_of(b, a, i)
        return order[which * inner + jnp.minimum(j, jnp.maximum(count[which] - 1, 0))]

    def cost(self, inputs: list[Spec], outputs: list[Spec], products: int) -> pl.CostEstimate:
        """If every block met every other: outer blocks move once, inner ones at every step."""
        outer, inner = self.lists.order.shape[2:]
        steps = self.b * self.heads * outer * inner
        length = {side: size for _, side, size in (*inputs, *outputs)}
        scores, moved = steps * length["outer"] * length["inner"], 0
        for x, side, size in (*inputs, *outputs):
            block = size * (1 if x.shape[2] == 1 else x.shape[3]) * x.dtype.itemsize
            moved += block * (steps if side == "inner" else steps // inner)
        h = inputs[0][0].shape[3]
        return pl.CostEstimate(flops=2 * products * scores * h, transcendentals=scores, bytes_accessed=moved)

    def run(self, body: Any, name: str, inputs: list[Spec], outputs: list[Spec], scratch: Any, products: int):
        """The outputs of a body over the grid; it gets the lists first.

        Raises:
          Unsupported: the lists do not fit SMEM.
        """
        order, flat = self.lists.order, [x.reshape(-1) for x in self.lists if x is not None]
        if sum(x.size for x in flat) > SMEM_WORDS:
            raise Unsupported(
                f"blockwise(impl='mosaic_tpu'): lists of {order.size} blocks exceed the {SMEM_WORDS} that "
                "SMEM holds. Take fewer rows of the batch at a time, or impl='xla'."
            )
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(flat),
                grid=(self.b, self.heads, *order.shape[2:]),
                in_specs=[self.spec(x) for x in inputs],
                out_specs=[self.spec(x) for x in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _, _ in outputs],
            compiler_params=compat.tpu_params(("parallel", "parallel", "parallel", "arbitrary")),
            cost_estimate=self.cost(inputs, outputs, products),
            interpret=self.interpret,
            name=name,
        )(*flat, *(x for x, _, _ in inputs))


class GridStep(NamedTuple):
    """Where in its list a body is."""

    first: Bool[Array, ""]
    last: Bool[Array, ""]
    live: Bool[Array, ""]


def step(grid: Grid, count: Any) -> GridStep:
    """The step of this program."""
    b, a, i, j = (pl.program_id(axis) for axis in range(4))
    return GridStep(j == 0, j == pl.num_programs(3) - 1, j < count[grid.list_of(b, a, i)])


def column(row: Array) -> Array:
    """[1, Y] to [Y, LANES], each lane a copy."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def as_row(column: Array) -> Array:
    """[Y, LANES] of equal lanes to [1, Y]."""
    return jnp.transpose(column)[:1]


def row(x: Array) -> Array:
    """[B, Y] or [B, A, Y] as an operand that is a row a head."""
    return x[:, None, None] if x.ndim == 2 else x[:, :, None]


def _clean(v: Array, k_pos: Int[Array, "1 S"]) -> Array:
    """v with zeros where padded, since 0 * NaN is NaN; costs something only where there is padding."""

    def masked() -> Array:
        return jnp.where(column(k_pos)[:, :1] >= 0, v, jnp.zeros((), v.dtype))

    return jax.lax.cond(jnp.min(k_pos.astype(jnp.float32)) < 0, masked, lambda: v)


def _forward_body(grid: Grid, sight: Sight, narrowed: bool) -> Callable[..., None]:
    def body(order: Any, count: Any, whole: Any, *refs: Any) -> None:
        q, k, v, q_pos, k_pos, *refs_ = refs
        admit, (out, lse, m, l, o, at) = (refs_[0], refs_[1:]) if narrowed else (None, refs_)
        now, whole_now = step(grid, count), step(grid, whole).live

        @pl.when(now.first)
        def _() -> None:
            m[...] = jnp.full_like(m, tiles.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)
            at[...] = column(q_pos[...])

        def grow(values: Array, seen: block_tiles.Seen | None) -> None:
            stats = (m[...], l[...], o[...])
            m[...], l[...], o[...] = block_tiles.forward(sight, q[...], k[...], values, seen, stats)

        @pl.when(whole_now)
        def _() -> None:
            grow(v[...], None)

        @pl.when(now.live & ~whole_now)
        def _() -> None:
            seen = block_tiles.Seen(at[...], k_pos[...], None if admit is None else admit[...])
            grow(_clean(v[...], k_pos[...]), seen)

        @pl.when(now.last)
        def _() -> None:
            result, lanes = tiles.finish((m[...], l[...], o[...]))
            out[...] = result.astype(out.dtype)
            lse[...] = as_row(lanes)

    return body


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def blockwise(
    q: Array, k: Array, v: Array, where: Where, *, sight: Sight, interpret: Any = False, blocks: Tuned = ()
) -> Partial:
    """See ``api.blockwise``."""
    (b, n, t, h), heads = q.shape, k.shape[1]
    count = n // heads * t
    bq, bk = sizes(blocks, "forward", count, k)
    x = block_lists.rows(q, k, where, sight.window, bq, bk, folded=True)
    grid = Grid(b, heads, block_lists.of_read(x, sight.window, bq, bk), interpret)
    narrow: list[Spec] = [] if x.admit is None else [(row(x.admit), "inner", bk)]
    out, lse = grid.run(
        _forward_body(grid, sight, bool(narrow)),
        "blockwise",
        [
            (x.q, "outer", bq),
            (x.k, "inner", bk),
            (pad_to_multiple(v, 2, bk), "inner", bk),
            (row(x.q_pos), "outer", bq),
            (row(x.k_pos), "inner", bk),
            *narrow,
        ],
        [
            (jax.ShapeDtypeStruct(x.q.shape, sight.dtype), "outer", bq),
            (jax.ShapeDtypeStruct((b, heads, 1, x.q.shape[2]), jnp.float32), "outer", bq),
        ],
        [
            *(pltpu.VMEM((bq, width), jnp.float32) for width in (LANES, LANES, h)),
            pltpu.VMEM((bq, LANES), jnp.int32),
        ],
        2,
    )
    return out[:, :, :count].reshape(b, n, t, h), lse[:, :, 0, :count].reshape(b, n, t)


def _mass_body(grid: Grid, sight: Sight, narrowed: bool) -> Callable[..., None]:
    def body(order: Any, count: Any, *refs: Any) -> None:
        q, k, lse, weights, q_pos, k_pos, *refs_ = refs
        admit, refs_ = (refs_[0], refs_[1:]) if narrowed else (None, refs_)
        out, total, at, let = (*refs_, None)[:4]
        now = step(grid, count)

        @pl.when(now.first)
        def _() -> None:
            total[...] = jnp.zeros_like(total)
            at[...] = column(k_pos[...])
            if admit is not None:
                let[...] = column(admit[...])

        @pl.when(now.live)
        def _() -> None:
            seen = block_tiles.Seen(q_pos[...], at[...], None if admit is None else let[...])
            sums = block_tiles.mass(sight, q[...], k[...], lse[...], weights[...], seen, total[:, :1])
            total[...] = jnp.broadcast_to(sums, total.shape)

        @pl.when(now.last)
        def _() -> None:
            out[...] = as_row(total[...])

    return body


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def column_mass(
    q: Array,
    k: Array,
    lse: Array,
    weights: Array,
    where: Where,
    *,
    sight: Sight,
    interpret: Any = False,
    blocks: Tuned = (),
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    (b, n, t, _), s = q.shape, k.shape[2]
    bq, bk = sizes(blocks, "mass", t, k)
    bq = round_up(bq, LANES)
    x = block_lists.rows(q, k, block_lists.weighed(where, weights), sight.window, bq, bk, folded=False)
    pairs = block_lists.any_visible(x, sight.window, bq, bk).swapaxes(2, 3)
    grid = Grid(b, n, block_lists.lists_of(pairs), interpret)
    narrow: list[Spec] = [] if x.admit is None else [(row(x.admit), "outer", bk)]
    (mass,) = grid.run(
        _mass_body(grid, sight, bool(narrow)),
        "column_mass",
        [
            (x.q, "inner", bq),
            (x.k, "outer", bk),
            (row(pad_to_multiple(lse, 2, bq)), "inner", bq),
            (row(pad_to_multiple(weights.astype(jnp.float32), 1, bq)), "inner", bq),
            (row(x.q_pos), "inner", bq),
            (row(x.k_pos), "outer", bk),
            *narrow,
        ],
        [(jax.ShapeDtypeStruct((b, n, 1, x.k.shape[2]), jnp.float32), "outer", bk)],
        [
            pltpu.VMEM((bk, LANES), jnp.float32),
            pltpu.VMEM((bk, LANES), jnp.int32),
            *([pltpu.VMEM((bk, LANES), jnp.int32)] if narrow else []),
        ],
        1,
    )
    return mass[:, :, 0, :s]
