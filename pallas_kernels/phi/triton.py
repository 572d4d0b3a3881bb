"""phi on GPU: one program a chunk of tokens, whose sums are added after; one a tile of queries.

Triton's tiles are powers of two: features and channels are padded to one in HBM where they are not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, softmax, tuning
from pallas_kernels.padding import round_up
from pallas_kernels.phi import ref, tiles
from pallas_kernels.phi.ref import Summary
from pallas_kernels.tuning import Blocks, Tuned

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

TILE = 32
"""Tokens of a tile: its exponentials and its values are float32, in registers."""

CHUNK = 1024
"""Tokens of a program."""

ROWS = 16
"""Queries of a tile; the summary's values are its other operand."""


def _wide(x: int) -> int:
    return max(16, pl.next_power_of_2(x))


def _padded(x: Array, *sizes: int) -> Array:
    """Zeros after the last axes of x, up to ``sizes``."""
    lead = x.ndim - len(sizes)
    return jnp.pad(x, [(0, 0)] * lead + [(0, size - have) for size, have in zip(sizes, x.shape[lead:])])


def sums(
    log_k: Float[Array, "B K S F"],
    v: Float[Array, "B K S H"],
    there: Bool[Array, "B K S"],
    shift: Float[Array, "B K F"],
    *,
    interpret: Any = False,
    blocks: Tuned | tuple[int, int] = (),
) -> tuple[Float[Array, "B K F"], Float[Array, "B K F H"]]:
    """The sums over tokens of exp(log_k - shift) and of the same times v."""
    (b, heads, s, f), h = log_k.shape, v.shape[3]
    chosen = tuning.pick(blocks, "sums", v.dtype, h, Blocks(k=TILE, item=CHUNK, warps=8, stages=1))
    tile_, chunk = chosen.k, min(chosen.item, round_up(s, chosen.k))
    parts, wf, wh = -(-s // chunk), _wide(f), _wide(h)

    def body(there: Any, shift: Any, log_k: Any, v: Any, weight: Any, values: Any) -> None:
        row = shift[...][None, :]

        def tile(c: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
            at = pl.ds(c * tile_, tile_)
            more = tiles.sums(log_k[at, :], v[at, :], there[at][:, None] > 0, row)
            return total[0] + more[0], total[1] + more[1]

        zero = jnp.zeros((1, wf), jnp.float32), jnp.zeros((wf, wh), jnp.float32)
        total = jax.lax.fori_loop(0, chunk // tile_, tile, zero)
        weight[...], values[...] = total[0].reshape(wf), total[1]

    tokens = b * heads * parts * chunk
    weight, values = pl.pallas_call(
        body,
        grid=(parts, heads, b),
        in_specs=[
            pl.BlockSpec((None, None, chunk), lambda i, k, b: (b, k, i)),
            pl.BlockSpec((None, None, wf), lambda i, k, b: (b, k, 0)),
            pl.BlockSpec((None, None, chunk, wf), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, None, chunk, wh), lambda i, k, b: (b, k, i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, wf), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, None, None, wf, wh), lambda i, k, b: (b, k, i, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, parts, wf), jnp.float32),
            jax.ShapeDtypeStruct((b, heads, parts, wf, wh), jnp.float32),
        ],
        compiler_params=compat.triton_params(warps=chosen.warps, stages=chosen.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * wf * wh,
            transcendentals=tokens * wf,
            bytes_accessed=tokens * (wf * log_k.dtype.itemsize + wh * v.dtype.itemsize),
        ),
        interpret=interpret,
        name="phi_sums",
    )(
        _padded(there.astype(jnp.int32), parts * chunk),
        _padded(softmax.finite(shift), wf),
        _padded(log_k, parts * chunk, wf),
        _padded(v, parts * chunk, wh),
    )
    return jnp.sum(weight, axis=2)[..., :f], jnp.sum(values, axis=2)[..., :f, :h]


build, subtract = ref.summing(sums, "interpret", "blocks")


@functools.partial(jax.jit, static_argnames=("interpret", "blocks"))
def evaluate(
    summary: Summary, log_q: Float[Array, "B N T F"], *, interpret: Any = False, blocks: Tuned = ()
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See ``api.phi_evaluate``."""
    (b, n, t, f), heads, h = log_q.shape, summary.shift.shape[1], summary.values.shape[3]
    total, wf, wh = n // heads * t, _wide(f), _wide(h)
    own = Blocks(q=ROWS, warps=4, stages=1)
    rows, *_, warps, stages = tuning.pick(blocks, "evaluate", summary.values.dtype, h, own)
    whole = round_up(total, rows)

    def body(shift: Any, weight: Any, values: Any, log_q: Any, out: Any, lse: Any) -> None:
        row, u = shift[...][None, :], weight[...][None, :]
        out[...], column = tiles.evaluated(log_q[...], row, u, values[...])
        lse[...] = column.reshape(rows)

    row = pl.BlockSpec((None, None, wf), lambda i, k, b: (b, k, 0))
    out, lse = pl.pallas_call(
        body,
        grid=(whole // rows, heads, b),
        in_specs=[
            row,
            row,
            pl.BlockSpec((None, None, wf, wh), lambda i, k, b: (b, k, 0, 0)),
            pl.BlockSpec((None, None, rows, wf), lambda i, k, b: (b, k, i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, rows, wh), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, None, rows), lambda i, k, b: (b, k, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, whole, wh), jnp.float32),
            jax.ShapeDtypeStruct((b, heads, whole), jnp.float32),
        ],
        compiler_params=compat.triton_params(warps=warps, stages=stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * heads * whole * wf * wh,
            transcendentals=b * heads * whole * wf,
            bytes_accessed=4 * b * heads * (wf * wh + whole * (wf + wh)),
        ),
        interpret=interpret,
        name="phi_evaluate",
    )(
        _padded(softmax.finite(summary.shift), wf),
        _padded(summary.weight, wf),
        _padded(summary.values, wf, wh),
        _padded(log_q.reshape(b, heads, total, f), whole, wf),
    )
    return out[:, :, :total, :h].reshape(b, n, t, h), lse[:, :, :total].reshape(b, n, t)
