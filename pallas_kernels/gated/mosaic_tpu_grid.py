"""What gated's TPU passes share: sizes, blocks and how a pass is called.

Grids go over tiles, the innermost axis summing into VMEM. Index maps of steps that causality leaves out
repeat the block that is there already, so such steps move nothing. Statistics of queries travel as rows
[B, N, 1, T] and are turned to columns once a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat, tuning
from pallas_kernels.gated.vjp import GatedSizes, Inputs, Rule
from pallas_kernels.padding import pad_to, round_up

if TYPE_CHECKING:
    from jaxtyping import Array, Float

BLOCK = 512
LANES = 128


def last(sizes: GatedSizes, i: Array) -> Array:
    """The last block of keys that block i of queries sees."""
    return ((i + 1) * sizes.bq - 1) // sizes.bk


def first(sizes: GatedSizes, j: Array) -> Array:
    """The first block of queries that sees block j of keys."""
    return (j * sizes.bk) // sizes.bq


class Blocks(NamedTuple):
    """What a step of a grid has of arrays like q, lse, k and log_gate."""

    q: pl.BlockSpec
    q_row: pl.BlockSpec
    k: pl.BlockSpec
    k_row: pl.BlockSpec


def sizes_of(x: Inputs, rule: Rule, what: str) -> GatedSizes:
    """Sizes of a pass over these arrays."""
    (b, n, t, h), heads = x.q.shape, x.k.shape[1]
    chosen = tuning.pick(rule.blocks, what, x.k.dtype, h, tuning.Blocks(q=BLOCK, k=BLOCK))
    bq, bk = (min(size, round_up(t, LANES)) for size in chosen[:2])
    size = math.lcm(bq, bk)
    return GatedSizes(b, n, heads, round_up(t, size), h, bq, bk, chosen, rule)


def query_major(sizes: GatedSizes) -> Blocks:
    """Of grid (B, N, nq, nk)."""
    return _blocks(
        sizes,
        lambda b, n, i, j, *_: (b, n, i),
        lambda b, n, i, j, *_: (b, n // sizes.group, jnp.minimum(j, last(sizes, i))),
    )


def key_major(sizes: GatedSizes) -> Blocks:
    """Of grid (B, K, nk, G nq): the query heads of a KV head one after the other."""

    def q(b: Array, kv: Array, j: Array, step: Array, *_: Any) -> tuple[Any, ...]:
        i = jnp.maximum(jax.lax.rem(step, sizes.nq), first(sizes, j))
        return b, kv * sizes.group + step // sizes.nq, i

    return _blocks(sizes, q, lambda b, kv, j, step, *_: (b, kv, j))


def _blocks(sizes: GatedSizes, q: Any, k: Any) -> Blocks:
    def wide(size: int, at: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size, sizes.h), lambda *step: (*at(*step), 0))

    def row(size: int, at: Any) -> pl.BlockSpec:
        def place(*step: Any) -> tuple[Any, ...]:
            b, head, block = at(*step)
            return b, head, 0, block

        return pl.BlockSpec((None, None, 1, size), place)

    return Blocks(wide(sizes.bq, q), row(sizes.bq, q), wide(sizes.bk, k), row(sizes.bk, k))


def as_rows(x: Float[Array, "B N T"], t: int) -> Float[Array, "B N 1 T"]:
    """Numbers of each position as rows of blocks."""
    return pad_to(x.astype(jnp.float32), t)[:, :, None]


def row(column: Float[Array, "R 1"]) -> Float[Array, "1 R"]:
    """In a body: a column as a row."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]


def shape(*size: int) -> jax.ShapeDtypeStruct:
    """Of a float32 output."""
    return jax.ShapeDtypeStruct(size, jnp.float32)


def call(
    sizes: GatedSizes,
    body: Any,
    name: str,
    grid: tuple[int, ...],
    ends: Array,
    inputs: Sequence[tuple[Any, pl.BlockSpec]],
    outputs: Sequence[tuple[Any, pl.BlockSpec]],
    scratch: Sequence[tuple[int, ...]],
    products: int,
) -> list[Array]:
    """Run ``body(ends, *inputs, *outputs, *scratch)`` over a grid.

    Args:
      sizes: static sizes.
      body: the kernel.
      name: of the pass.
      grid: the last axis of which sums.
      ends: the length of each row, in SMEM.
      inputs, outputs: arrays or shapes and their blocks.
      scratch: shapes of float32 scratch.
      products: matrix products a tile takes, for the cost estimate.
    """
    pairs = sizes.b * sizes.n * sizes.t * sizes.t // 2
    moved = sum(x.size * x.dtype.itemsize for x, _ in (*inputs, *outputs))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        ),
        out_shape=[x for x, _ in outputs],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * sizes.h, transcendentals=pairs, bytes_accessed=moved
        ),
        interpret=sizes.rule.interpret,
        name=f"gated_{name}",
    )(ends, *(x for x, _ in inputs))
