"""blockwise and column_mass on GPU: one program an outer block, which walks its list of inner blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.blockwise import plan
from pallas_kernels.blockwise import tiles as mine

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Operand = tuple["Array | jax.ShapeDtypeStruct", int | None]
"""An array [B, heads, length, ...] and the length of a program's block of it; None for all of it."""


def blocks(rows: int, h: int, dtype: Any) -> tuple[int, int]:
    """Lengths of blocks of queries and of keys that fit shared memory with two stages of loads.

    float32 products at full precision have no tensor core: they are unrolled, and large ones compile for
    minutes.
    """
    most = 64 if h <= 128 and jnp.dtype(dtype).itemsize == 2 else 32
    return max(16, min(most, pl.next_power_of_2(rows))), most


def wide(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Channels padded with zeros to a power of two, which Triton's tiles are."""
    return plan.padded(x, x.ndim - 1, pl.next_power_of_2(x.shape[-1]))


class Grid(NamedTuple):
    """Rows, heads, and the walk of each outer block."""

    b: int
    heads: int
    walk: plan.Walk
    interpret: Any

    def spec(self, operand: Operand) -> pl.BlockSpec:
        """A program's part of an operand."""
        x, length = operand
        per, more = self.heads // x.shape[1], (0,) * (len(x.shape) - 3)
        whole = length is None
        block = (None, None, x.shape[2] if whole else length, *x.shape[3:])
        return pl.BlockSpec(block, lambda i, a, b: (b, a // per, 0 if whole else i, *more))

    def run(self, body: Any, name: str, inputs: list[Operand], outputs: list[Operand]) -> Any:
        """The outputs of a body; it gets its list, whose last entry is its length, before the inputs."""
        lists = jnp.concatenate([self.walk.order, self.walk.length[..., None]], axis=-1)
        per, outer = self.heads // lists.shape[1], lists.shape[2]
        mine_ = pl.BlockSpec((None, None, None, lists.shape[3]), lambda i, a, b: (b, a // per, i, 0))
        return pl.pallas_call(
            body,
            grid=(outer, self.heads, self.b),
            in_specs=[mine_, *(self.spec(x) for x in inputs)],
            out_specs=[self.spec(x) for x in outputs],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
            compiler_params=compat.triton_params(warps=4, stages=2),
            interpret=self.interpret,
            name=name,
        )(lists, *(x for x, _ in inputs))


def heads_first(x: Array) -> Array:
    """[B, Y] as an operand all heads share."""
    return x[:, None]


def over(listed: Any, length: int, visit: Callable[[Any, Any], Any], start: Any) -> Any:
    """Fold ``visit`` (slice of the inner side, carry) over the listed blocks."""
    count = listed[listed.shape[0] - 1]
    return jax.lax.fori_loop(
        0, count, lambda c, carry: visit(pl.ds(listed[c] * length, length), carry), start
    )


def _forward_body(sight: plan.Sight, bk: int, narrowed: bool) -> Callable[..., None]:
    def body(listed: Any, q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, *refs: Any) -> None:
        admit, (out, lse) = (refs[0], refs[1:]) if narrowed else (None, refs)
        rows, at = q[...], q_pos[...][:, None]

        def visit(cut: Any, stats: tiles.Stats) -> tiles.Stats:
            there = k_pos[cut]
            seen = mine.Seen(at, there[None, :], None if admit is None else admit[cut][None, :])
            # 0 * NaN is NaN: padded values may hold anything.
            values = jnp.where(there[:, None] >= 0, v[cut, :], jnp.zeros((), v.dtype))
            return mine.forward(sight, rows, k[cut, :], values, seen, stats)

        found, column = tiles.finish(over(listed, bk, visit, tiles.start(*rows.shape)))
        out[...] = found
        lse[...] = column.reshape(rows.shape[0])

    return body


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap", "interpret"))
def blockwise(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.blockwise``."""
    (b, n, t, h), heads = q.shape, k.shape[1]
    count = n // heads * t
    bq, bk = blocks(count, h, k.dtype)
    x = plan.rows(wide(q), wide(k), q_pos, k_pos, admit, bq, bk, folded=True)
    grid = Grid(b, heads, plan.walk(plan.meetings(x, window, bq, bk)), interpret)
    narrow: list[Operand] = [] if x.admit is None else [(x.admit, None)]
    out, lse = grid.run(
        _forward_body(plan.Sight(window, scale, softcap, interpret), bk, bool(narrow)),
        "blockwise",
        [
            (x.q, bq),
            (x.k, None),
            (wide(plan.padded(v, 2, bk)), None),
            (heads_first(x.q_pos), bq),
            (heads_first(x.k_pos), None),
            *narrow,
        ],
        [
            (jax.ShapeDtypeStruct(x.q.shape, jnp.float32), bq),
            (jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32), bq),
        ],
    )
    return out[:, :, :count, :h].reshape(b, n, t, h), lse[:, :, :count].reshape(b, n, t)


def _mass_body(sight: plan.Sight, bq: int, narrowed: bool) -> Callable[..., None]:
    def body(listed: Any, q: Any, k: Any, lse: Any, weights: Any, q_pos: Any, k_pos: Any, *refs: Any) -> None:
        admit, (out,) = (refs[0], refs[1:]) if narrowed else (None, refs)
        keys, at = k[...], k_pos[...][:, None]
        let = None if admit is None else admit[...][:, None]

        def visit(cut: Any, total: Array) -> Array:
            seen = mine.Seen(q_pos[cut][None, :], at, let)
            return mine.mass(sight, q[cut, :], keys, lse[cut][None, :], weights[cut][None, :], seen, total)

        found = over(listed, bq, visit, jnp.zeros((keys.shape[0], 1), jnp.float32))
        out[...] = found.reshape(keys.shape[0])

    return body


@functools.partial(jax.jit, static_argnames=("window", "scale", "softcap", "interpret"))
def column_mass(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    weights: Float[Array, "B T"],
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
    admit: Bool[Array, "B K S"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    interpret: Any = False,
) -> Float[Array, "B N S"]:
    """See ``api.column_mass``."""
    b, n, t, h = q.shape
    # A block of queries of weight 0 is the same as padding, and is skipped.
    q_pos = jnp.where(weights != 0, q_pos, -1)
    bq, bk = blocks(t, h, k.dtype)
    x = plan.rows(wide(q), wide(k), q_pos, k_pos, admit, bq, bk, folded=False)
    grid = Grid(b, n, plan.walk(plan.meetings(x, window, bq, bk).swapaxes(2, 3)), interpret)
    narrow: list[Operand] = [] if x.admit is None else [(x.admit, bk)]
    (found,) = grid.run(
        _mass_body(plan.Sight(window, scale, softcap, interpret), bq, bool(narrow)),
        "column_mass",
        [
            (x.q, None),
            (x.k, bk),
            (plan.padded(lse, 2, bq), None),
            (heads_first(plan.padded(weights.astype(jnp.float32), 1, bq)), None),
            (heads_first(x.q_pos), None),
            (heads_first(x.k_pos), bk),
            *narrow,
        ],
        [(jax.ShapeDtypeStruct((b, n, x.k.shape[2]), jnp.float32), bk)],
    )
    return found[:, :, : k.shape[2]]
