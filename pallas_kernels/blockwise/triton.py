"""blockwise and column_mass on GPU: one program an outer block, which reads its list of inner blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles, tuning
from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise import tiles as block_tiles
from pallas_kernels.blockwise.sight import Partial, Sight, Where
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.tuning import Blocks, Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Operand = tuple["Array | jax.ShapeDtypeStruct", int | None]
"""An array [B, heads, length, ...] and the length of a program's block of it; None for all of it."""


def sizes(blocks: Tuned, what: str, rows: int, k: Float[Array, "B K S H"]) -> Blocks:
    """Lengths of blocks of queries and of keys that fit shared memory with two stages of loads.

    float32 products at full precision have no tensor core: they are unrolled, and large ones compile for
    minutes. The backward pass holds twice as many tiles.
    """
    most = 64 if k.shape[3] <= 128 and k.dtype.itemsize == 2 else 32
    most = most // 2 if what == "backward" else most
    chosen = tuning.pick(blocks, what, k.dtype, k.shape[3], Blocks(q=most, k=most, warps=4, stages=2))
    return chosen._replace(q=max(16, min(chosen.q, pl.next_power_of_2(rows))))


def wide(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Channels padded with zeros to a power of two, which Triton's tiles are."""
    return pad_to_multiple(x, x.ndim - 1, pl.next_power_of_2(x.shape[-1]))


class Grid(NamedTuple):
    """Rows, heads, and the list of inner blocks of each outer block."""

    b: int
    heads: int
    lists: block_lists.BlockLists
    blocks: Blocks
    interpret: Any

    def spec(self, operand: Operand) -> pl.BlockSpec:
        """A program's part of an operand."""
        x, length = operand
        per, more = self.heads // x.shape[1], (0,) * (len(x.shape) - 3)
        whole = length is None
        block = (None, None, x.shape[2] if whole else length, *x.shape[3:])
        return pl.BlockSpec(block, lambda i, a, b: (b, a // per, 0 if whole else i, *more))

    def cost(self, inputs: list[Operand], outputs: list[Operand], products: int) -> pl.CostEstimate:
        """If every block met every other; what programs share they find in the cache."""
        outer, inner = self.lists.order.shape[2:]
        scores = self.b * self.heads * outer * inner * self.blocks.q * self.blocks.k
        moved = sum(x.size * x.dtype.itemsize for x, _ in (*inputs, *outputs))
        h = inputs[0][0].shape[3]
        return pl.CostEstimate(flops=2 * products * scores * h, transcendentals=scores, bytes_accessed=moved)

    def run(
        self, body: Any, name: str, inputs: list[Operand], outputs: list[Operand], products: int
    ) -> list[Array]:
        """The outputs of a body; it gets its list, whose last entries are its counts, before the inputs."""
        order, *counts = (x for x in self.lists if x is not None)
        lists = jnp.concatenate([order, *(x[..., None] for x in counts)], axis=-1)
        per, outer = self.heads // lists.shape[1], lists.shape[2]
        own = pl.BlockSpec((None, None, None, lists.shape[3]), lambda i, a, b: (b, a // per, i, 0))
        return pl.pallas_call(
            body,
            grid=(outer, self.heads, self.b),
            in_specs=[own, *(self.spec(x) for x in inputs)],
            out_specs=[self.spec(x) for x in outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
            compiler_params=compat.triton_params(warps=self.blocks.warps, stages=self.blocks.stages),
            cost_estimate=self.cost(inputs, outputs, products),
            interpret=self.interpret,
            name=name,
        )(lists, *(x for x, _ in inputs))


def over(
    listed: Any,
    length: int,
    visit: Callable[[Any, Any], Any],
    start: Any,
    whole: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Fold ``visit`` (slice of the inner side, carry) over the listed blocks.

    With ``whole`` the list sorts the blocks: it visits those that are seen whole, which come first.
    """

    def fold(visit: Callable[[Any, Any], Any], first: Any, end: Any, start: Any) -> Any:
        def step(c: Any, carry: Any) -> Any:
            return visit(pl.ds(listed[c] * length, length), carry)

        return jax.lax.fori_loop(first, end, step, start)

    last = listed.shape[0] - 1
    if whole is None:
        return fold(visit, 0, listed[last], start)
    return fold(visit, listed[last], listed[last - 1], fold(whole, 0, listed[last], start))


def _forward_body(sight: Sight, bk: int, narrowed: bool) -> Callable[..., None]:
    def body(listed: Any, q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *refs: Any) -> None:
        admit, (out, lse) = (refs[0], refs[1:]) if narrowed else (None, refs)
        rows, at = q[...], q_pos[...][:, None]

        def visit(cut: Any, stats: tiles.Stats) -> tiles.Stats:
            there = k_pos[cut]
            seen = block_tiles.Seen(at, there[None, :], None if admit is None else admit[cut][None, :])
            # 0 * NaN is NaN: padded values may hold anything.
            values = jnp.where(there[:, None] >= 0, v[cut, :], jnp.zeros((), v.dtype))
            return block_tiles.forward(sight, rows, k[cut, :], values, seen, stats)

        def whole(cut: Any, stats: tiles.Stats) -> tiles.Stats:
            return block_tiles.forward(sight, rows, k[cut, :], v[cut, :], None, stats)

        result, column = tiles.finish(over(listed, bk, visit, tiles.start(*rows.shape), whole))
        out[...] = result
        lse[...] = column.reshape(rows.shape[0])

    return body


@functools.partial(jax.jit, static_argnames=("sight", "interpret", "blocks"))
def blockwise(
    q: Array, k: Array, v: Array, where: Where, *, sight: Sight, interpret: Any = False, blocks: Tuned = ()
) -> Partial:
    """See ``api.blockwise``."""
    (b, n, t, h), heads = q.shape, k.shape[1]
    count = n // heads * t
    bq, bk, *_ = chosen = sizes(blocks, "forward", count, k)
    x = block_lists.rows(wide(q), wide(k), where, sight.window, bq, bk, folded=True)
    grid = Grid(b, heads, block_lists.of_read(x, sight.window, bq, bk), chosen, interpret)
    narrow: list[Operand] = [] if x.admit is None else [(x.admit, None)]
    out, lse = grid.run(
        _forward_body(sight, bk, bool(narrow)),
        "blockwise",
        [
            (x.q, bq),
            (x.k, None),
            (wide(pad_to_multiple(v, 2, bk)), None),
            (x.q_pos[:, None], bq),
            (x.k_pos[:, None], None),
            *narrow,
        ],
        [
            (jax.ShapeDtypeStruct(x.q.shape, jnp.float32), bq),
            (jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32), bq),
        ],
        2,
    )
    # Rounded here: in the kernel it takes 209 registers instead of 168, two programs at a time, not three.
    out = out.astype(sight.dtype)
    return out[:, :, :count, :h].reshape(b, n, t, h), lse[:, :, :count].reshape(b, n, t)


def _mass_body(sight: Sight, bq: int, narrowed: bool) -> Callable[..., None]:
    def body(listed: Any, q: Any, k: Any, lse: Any, weights: Any, q_pos: Any, k_pos: Any, *refs: Any) -> None:
        admit, (out,) = (refs[0], refs[1:]) if narrowed else (None, refs)
        keys, at = k[...], k_pos[...][:, None]
        let = None if admit is None else admit[...][:, None]

        def visit(cut: Any, total: Array) -> Array:
            seen = block_tiles.Seen(q_pos[cut][None, :], at, let)
            return block_tiles.mass(
                sight, q[cut, :], keys, lse[cut][None, :], weights[cut][None, :], seen, total
            )

        total = over(listed, bq, visit, jnp.zeros((keys.shape[0], 1), jnp.float32))
        out[...] = total.reshape(keys.shape[0])

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
    b, n, t, _ = q.shape
    bq, bk, *_ = chosen = sizes(blocks, "mass", t, k)
    q, k = wide(q), wide(k)
    x = block_lists.rows(q, k, block_lists.weighed(where, weights), sight.window, bq, bk, folded=False)
    pairs = block_lists.any_visible(x, sight.window, bq, bk).swapaxes(2, 3)
    grid = Grid(b, n, block_lists.lists_of(pairs), chosen, interpret)
    narrow: list[Operand] = [] if x.admit is None else [(x.admit, bk)]
    (mass,) = grid.run(
        _mass_body(sight, bq, bool(narrow)),
        "column_mass",
        [
            (x.q, None),
            (x.k, bk),
            (pad_to_multiple(lse, 2, bq), None),
            (pad_to_multiple(weights.astype(jnp.float32), 1, bq)[:, None], None),
            (x.q_pos[:, None], None),
            (x.k_pos[:, None], bk),
            *narrow,
        ],
        [(jax.ShapeDtypeStruct((b, n, x.k.shape[2]), jnp.float32), bk)],
        1,
    )
    return mass[:, :, : k.shape[2]]
