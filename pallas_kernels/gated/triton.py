"""gated on GPU: one program a block of queries (or of keys, for dk), its sums in registers.

Triton's tiles are powers of two: positions are padded to whole blocks and channels to the next power of
two, in HBM; at a head dim of 64, 128 or 256 and whole blocks nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tuning
from pallas_kernels import tiles as common
from pallas_kernels.gated import tiles
from pallas_kernels.gated.vjp import Above, GatedSizes, Inputs, Rule, differentiable
from pallas_kernels.padding import pad_to, round_up
from pallas_kernels.tuning import Blocks

if TYPE_CHECKING:
    from jaxtyping import Array, Float

BLOCKS = {
    "forward": Blocks(q=64, k=64, warps=4, stages=2),
    "backward": Blocks(q=32, k=64, warps=4, stages=2),
}
WIDE = {**BLOCKS, "backward": Blocks(q=32, k=64, warps=8, stages=2)}
EXACT = {
    "forward": Blocks(q=32, k=32, warps=4, stages=2),
    "backward": Blocks(q=32, k=32, warps=8, stages=2),
}
"""Of each pass: for heads up to 128, for wider ones, for float32. Larger ones spill registers."""


def _sizes(x: Inputs, rule: Rule, what: str) -> GatedSizes:
    (b, n, t, h), heads, dtype = x.q.shape, x.k.shape[1], x.k.dtype
    own = EXACT if dtype.itemsize == 4 else WIDE if h > 128 else BLOCKS
    blocks = {name: tuning.pick(rule.blocks, name, dtype, h, default) for name, default in own.items()}
    # One size for both passes: a multiple of every block either takes.
    size, wide = max(y for each in blocks.values() for y in each[:2]), max(16, pl.next_power_of_2(h))
    chosen = blocks[what]
    return GatedSizes(b, n, heads, round_up(t, size), wide, chosen.q, chosen.k, chosen, rule)


def _shape(*size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.float32)


def _call(
    sizes: GatedSizes, body: Any, name: str, grid: Any, inputs: Any, outputs: Any, products: int
) -> Any:
    """Run a body over a grid; ``inputs`` and ``outputs`` are (array or shape, block shape, index map)."""
    pairs = sizes.b * sizes.n * sizes.t * sizes.t // 2
    moved = sum(x.size * x.dtype.itemsize for x, *_ in (*inputs, *outputs))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.BlockSpec(block, at) for _, block, at in inputs],
        out_specs=[pl.BlockSpec(block, at) for _, block, at in outputs],
        out_shape=[shape for shape, *_ in outputs],
        compiler_params=compat.triton_params(warps=sizes.blocks.warps, stages=sizes.blocks.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * sizes.h, transcendentals=pairs, bytes_accessed=moved
        ),
        interpret=sizes.rule.interpret,
        name=f"gated_{name}",
    )(*(x for x, *_ in inputs))


def _count(sizes: GatedSizes, i: Array, length: Array) -> Array:
    """Blocks of keys that block i of queries sees."""
    upto = jnp.minimum((i + 1) * sizes.bq, length)
    return jnp.where(i * sizes.bq < length, (upto + sizes.bk - 1) // sizes.bk, 0)


def _forward(x: Inputs, rule: Rule) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    (q, k, v, log_gate, _), sizes = x, _sizes(x, rule, "forward")
    t, h = q.shape[2:]
    bq, bk, group = sizes.bq, sizes.bk, sizes.group

    def body(ends: Any, q: Any, k: Any, v: Any, gate: Any, out: Any, lse: Any) -> None:
        i, length, q_i = pl.program_id(0), ends[0], q[...]

        def key_block(j: Array, stats: common.Stats) -> common.Stats:
            at = pl.ds(j * bk, bk)
            place = tiles.by_query(i * bq, j * bk, bq, bk, length)
            return tiles.grow(stats, q_i, k[at, :], v[at, :], gate[at][None, :], place, rule)

        stats = jax.lax.fori_loop(0, _count(sizes, i, length), key_block, common.start(bq, sizes.h))
        out[...], column = common.finish(stats)
        lse[...] = column.reshape(bq)

    keys = (None, None, sizes.t, sizes.h), lambda i, n, b: (b, n // group, 0, 0)
    queries = (None, None, bq, sizes.h), lambda i, n, b: (b, n, i, 0)
    out, lse = _call(
        sizes,
        body,
        "forward",
        (sizes.t // bq, sizes.n, sizes.b),
        [
            (x.ends()[:, None], (None, 1), lambda i, n, b: (b, 0)),
            (pad_to(q.astype(k.dtype), sizes.t, sizes.h), *queries),
            (pad_to(k, sizes.t, sizes.h), *keys),
            (pad_to(v, sizes.t, sizes.h), *keys),
            (pad_to(log_gate.astype(jnp.float32), sizes.t), *_without_channels(*keys)),
        ],
        [
            (_shape(sizes.b, sizes.n, sizes.t, sizes.h), *queries),
            (_shape(sizes.b, sizes.n, sizes.t), *_without_channels(*queries)),
        ],
        2,
    )
    return out[:, :, :t, :h], lse[:, :, :t]


def _without_channels(block: tuple[Any, ...], at: Callable[..., tuple[Any, ...]]) -> tuple[Any, Any]:
    """A block and its index map for an array that has a number where others have channels."""
    return block[:-1], lambda *step: at(*step)[:-1]


def _backward(x: Inputs, above: Above, rule: Rule) -> tuple[Array, ...]:
    (q, k, v, log_gate, _), sizes = x, _sizes(x, rule, "backward")
    (t, h), ends = q.shape[2:], x.ends()[:, None]
    arrays = (q.astype(k.dtype), k, v, above.d_out.astype(v.dtype), *above[1:], log_gate.astype(jnp.float32))
    padded = [pad_to(y, sizes.t, sizes.h) for y in arrays]
    dk, dv, d_gate = _key_gradients(sizes, ends, *padded)
    dq = _query_gradient(sizes, ends, *padded)
    return dq[:, :, :t, :h], dk[:, :, :t, :h], dv[:, :, :t, :h], d_gate[:, :, :t]


def _key_gradients(sizes: GatedSizes, ends: Array, *arrays: Array) -> tuple[Array, Array, Array]:
    """dk, dv, d log_gate: one program a block of keys, over all query heads of its KV head."""
    bq, bk, group = sizes.bq, sizes.bk, sizes.group

    def body(*refs: Any) -> None:
        ends, q, k, v, d_out, lse, delta, gate, *outs = refs
        j, length = pl.program_id(0), ends[0]
        k_j, v_j, column = k[...], v[...], gate[...][:, None]
        first = (j * bk) // bq
        each = jnp.maximum((length + bq - 1) // bq - first, 0)

        def query_block(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            g, i = jax.lax.div(step, each), first + jax.lax.rem(step, each)
            at = pl.ds(i * bq, bq)
            place = tiles.by_key(i * bq, j * bk, bq, bk, length)
            queries = q[g, at, :]
            rest = d_out[g, at, :], lse[g, at][None], delta[g, at][None]
            more = tiles.key_gradients(queries, k_j, v_j, column, *rest, place, sizes.rule)
            return tuple(a + b for a, b in zip(sums, more))

        zero = jnp.zeros((bk, sizes.h), jnp.float32)
        sums = jax.lax.fori_loop(0, group * each, query_block, (zero, zero, jnp.zeros((bk, 1), jnp.float32)))
        outs[0][...], outs[1][...], outs[2][...] = sums[0], sums[1], sums[2].reshape(bk)

    def grouped(x: Array) -> Array:
        return x.reshape(sizes.b, sizes.heads, group, *x.shape[2:])

    q, k, v, d_out, lse, delta, gate = arrays
    queries = (None, None, group, sizes.t, sizes.h), lambda j, kv, b: (b, kv, 0, 0, 0)
    keys = (None, None, bk, sizes.h), lambda j, kv, b: (b, kv, j, 0)
    rows, gates = _without_channels(*queries), _without_channels(*keys)
    shape = _shape(sizes.b, sizes.heads, sizes.t, sizes.h)
    return _call(
        sizes,
        body,
        "key_gradients",
        (sizes.t // bk, sizes.heads, sizes.b),
        [
            (ends, (None, 1), lambda j, kv, b: (b, 0)),
            (grouped(q), *queries),
            (k, *keys),
            (v, *keys),
            (grouped(d_out), *queries),
            (grouped(lse), *rows),
            (grouped(delta), *rows),
            (gate, *gates),
        ],
        [(shape, *keys), (shape, *keys), (_shape(*shape.shape[:3]), *gates)],
        4,
    )


def _query_gradient(sizes: GatedSizes, ends: Array, *arrays: Array) -> Array:
    """dq: one program a block of queries."""
    bq, bk, group = sizes.bq, sizes.bk, sizes.group

    def body(*refs: Any) -> None:
        ends, q, k, v, d_out, lse, delta, gate, out = refs
        i, length = pl.program_id(0), ends[0]
        q_i, do_i, lse_i, delta_i = q[...], d_out[...], lse[...][:, None], delta[...][:, None]

        def key_block(j: Array, dq: Array) -> Array:
            at = pl.ds(j * bk, bk)
            place = tiles.by_query(i * bq, j * bk, bq, bk, length)
            tile = (q_i, k[at, :], v[at, :], gate[at][None, :], do_i, lse_i, delta_i)
            return dq + tiles.query_gradient(*tile, place, sizes.rule)

        zero = jnp.zeros((bq, sizes.h), jnp.float32)
        out[...] = jax.lax.fori_loop(0, _count(sizes, i, length), key_block, zero)

    q, k, v, d_out, lse, delta, gate = arrays
    queries = (None, None, bq, sizes.h), lambda i, n, b: (b, n, i, 0)
    keys = (None, None, sizes.t, sizes.h), lambda i, n, b: (b, n // group, 0, 0)
    rows = _without_channels(*queries)
    return _call(
        sizes,
        body,
        "query_gradient",
        (sizes.t // bq, sizes.n, sizes.b),
        [
            (ends, (None, 1), lambda i, n, b: (b, 0)),
            (q, *queries),
            (k, *keys),
            (v, *keys),
            (d_out, *queries),
            (lse, *rows),
            (delta, *rows),
            (gate, *_without_channels(*keys)),
        ],
        [(_shape(sizes.b, sizes.n, sizes.t, sizes.h), *queries)],
        3,
    )[0]


gated = differentiable(_forward, _backward)
