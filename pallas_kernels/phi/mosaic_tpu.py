"""phi on TPU: tokens in tiles whose sums stay in VMEM; queries in tiles of their group's rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, softmax, tuning
from pallas_kernels.padding import pad_to, round_up
from pallas_kernels.phi import ref, tiles
from pallas_kernels.phi.ref import Summary
from pallas_kernels.tuning import Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

TILE = 512
"""Tokens of a tile, and at most as many queries."""

LANES = 128


def sums(
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    there: Bool[Array, "B K S"],
    shift: Float[Array, "B K F"],
    *,
    interpret: Any = False,
    blocks: Tuned | tuple[int, int] = (),
) -> tuple[Float[Array, "B K F"], Float[Array, "B K F H"]]:
    """The sums over tokens of exp(log_k - shift) and of the same times v: grid (B, K, tiles)."""
    (b, heads, s, f), h = log_k.shape, v.shape[3]
    tile = min(tuning.pick(blocks, "sums", v.dtype, h, tuning.Blocks(k=TILE)).k, round_up(s, LANES))
    whole = round_up(s, tile)

    def body(there: Any, shift: Any, log_k: Any, v: Any, weight: Any, values: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            weight[...] = jnp.zeros_like(weight)
            values[...] = jnp.zeros_like(values)

        column = jnp.transpose(jnp.broadcast_to(there[...], (LANES, tile)))[:, :1] > 0
        more = tiles.sums(log_k[...], v[...], column, shift[...])
        weight[...] += more[0]
        values[...] += more[1]

    row = pl.BlockSpec((None, None, 1, f), lambda b, k, i: (b, k, 0, 0))
    tokens = b * heads * whole
    weight, values = pl.pallas_call(
        body,
        grid=(b, heads, whole // tile),
        in_specs=[
            pl.BlockSpec((None, None, 1, tile), lambda b, k, i: (b, k, 0, i)),
            row,
            pl.BlockSpec((None, None, tile, f), lambda b, k, i: (b, k, i, 0)),
            pl.BlockSpec((None, None, tile, h), lambda b, k, i: (b, k, i, 0)),
        ],
        out_specs=[row, pl.BlockSpec((None, None, f, h), lambda b, k, i: (b, k, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, 1, f), jnp.float32),
            jax.ShapeDtypeStruct((b, heads, f, h), jnp.float32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * f * h,
            transcendentals=tokens * f,
            bytes_accessed=tokens * (f * log_k.dtype.itemsize + h * v.dtype.itemsize),
        ),
        interpret=interpret,
        name="phi_sums",
    )(
        pad_to(there.astype(jnp.float32), whole)[:, :, None],
        softmax.finite(shift)[:, :, None],
        pad_to(log_k, whole),
        pad_to(v, whole),
    )
    return weight[:, :, 0], values


build, subtract = ref.summing(sums, "interpret", "blocks")


@functools.partial(jax.jit, static_argnames=("interpret", "blocks"))
def evaluate(
    summary: Summary, log_q: Float[Array, "B N T F"], *, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.phi_evaluate``."""
    (b, n, t, f), heads, h = log_q.shape, summary.shift.shape[1], summary.values.shape[3]
    total = n // heads * t
    own = tuning.Blocks(q=TILE)
    rows = min(tuning.pick(blocks, "evaluate", summary.values.dtype, h, own).q, round_up(total, 16))
    whole = round_up(total, rows)
    queries = pad_to(log_q.reshape(b, heads, total, f), whole)

    def body(shift: Any, weight: Any, values: Any, log_q: Any, out: Any, lse: Any) -> None:
        out[...], column = tiles.evaluated(log_q[...], shift[...], weight[...], values[...])
        lse[...] = jnp.broadcast_to(column, lse.shape)

    row = pl.BlockSpec((None, None, 1, f), lambda b, k, i: (b, k, 0, 0))
    out, lse = pl.pallas_call(
        body,
        grid=(b, heads, whole // rows),
        in_specs=[
            row,
            row,
            pl.BlockSpec((None, None, f, h), lambda b, k, i: (b, k, 0, 0)),
            pl.BlockSpec((None, None, rows, f), lambda b, k, i: (b, k, i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, rows, h), lambda b, k, i: (b, k, i, 0)),
            pl.BlockSpec((None, None, rows, LANES), lambda b, k, i: (b, k, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, whole, h), jnp.float32),
            jax.ShapeDtypeStruct((b, heads, whole, LANES), jnp.float32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * heads * whole * f * h,
            transcendentals=b * heads * whole * f,
            bytes_accessed=4 * (summary.values.size + b * heads * whole * (f + h)),
        ),
        interpret=interpret,
        name="phi_evaluate",
    )(softmax.finite(summary.shift)[:, :, None], summary.weight[:, :, None], summary.values, queries)
    return out[:, :, :total].reshape(b, n, t, h), lse[:, :, :total, 0].reshape(b, n, t)
