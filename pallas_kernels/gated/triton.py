"""gated on GPU: one program a block of queries (or of keys, for dk), its sums in registers.

Triton's tiles are powers of two: positions are padded to whole blocks and channels to the next power of
two, in HBM; at a head dim of 64, 128 or 256 and whole blocks nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, tuning
from pallas_kernels import tiles as common
from pallas_kernels.gated import tiles
from pallas_kernels.gated.plan import Plan
from pallas_kernels.gated.vjp import Above, Inputs, Rule, differentiable
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


def _own(dtype: Any, h: int) -> dict[str, Blocks]:
    return EXACT if dtype.itemsize == 4 else WIDE if h > 128 else BLOCKS


def _plan(x: Inputs, rule: Rule, what: str) -> Plan:
    (b, n, t, h), heads = x.q.shape, x.k.shape[1]
    found = {
        name: tuning.pick(rule.blocks, name, x.k.dtype, h, own) for name, own in _own(x.k.dtype, h).items()
    }
    # One size for both passes: a multiple of every block either takes.
    size, wide = max(y for sizes in found.values() for y in sizes[:2]), max(16, pl.next_power_of_2(h))
    mine = found[what]
    return Plan(b, n, heads, -(-t // size) * size, wide, mine.q, mine.k, mine, rule)


def _padded(x: Array, plan: Plan) -> Array:
    wide = [(0, plan.h - x.shape[3])] if x.ndim == 4 else []
    return jnp.pad(x, [(0, 0), (0, 0), (0, plan.t - x.shape[2]), *wide])


def _shape(*size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, jnp.float32)


def _call(plan: Plan, body: Any, name: str, grid: Any, inputs: Any, outputs: Any, products: int) -> Any:
    """Run a body over a grid; ``inputs`` and ``outputs`` are (array or shape, block shape, index map)."""
    pairs = plan.b * plan.n * plan.t * plan.t // 2
    moved = sum(x.size * x.dtype.itemsize for x, *_ in (*inputs, *outputs))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.BlockSpec(block, at) for _, block, at in inputs],
        out_specs=[pl.BlockSpec(block, at) for _, block, at in outputs],
        out_shape=[shape for shape, *_ in outputs],
        compiler_params=compat.triton_params(warps=plan.sizes.warps, stages=plan.sizes.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * plan.h, transcendentals=pairs, bytes_accessed=moved
        ),
        interpret=plan.rule.interpret,
        name=f"gated_{name}",
    )(*(x for x, *_ in inputs))


def _count(plan: Plan, i: Array, length: Array) -> Array:
    """Blocks of keys that block i of queries sees."""
    upto = jnp.minimum((i + 1) * plan.bq, length)
    return jnp.where(i * plan.bq < length, (upto + plan.bk - 1) // plan.bk, 0)


def _forward(x: Inputs, rule: Rule) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    (q, k, v, log_gate, _), plan = x, _plan(x, rule, "forward")
    t, h = q.shape[2:]
    bq, bk = plan.bq, plan.bk

    def body(ends: Any, q: Any, k: Any, v: Any, gate: Any, out: Any, lse: Any) -> None:
        i, length, q_i = pl.program_id(0), ends[0], q[...]

        def key_block(j: Array, stats: common.Stats) -> common.Stats:
            at = pl.ds(j * bk, bk)
            place = tiles.by_query(i * bq, j * bk, bq, bk, length)
            return tiles.grow(stats, q_i, k[at, :], v[at, :], gate[at][None, :], place, rule)

        stats = jax.lax.fori_loop(0, _count(plan, i, length), key_block, common.start(bq, plan.h))
        out[...], column = common.finish(stats)
        lse[...] = column.reshape(bq)

    def q_at(i: Array, n: Array, b: Array) -> tuple[Any, ...]:
        return b, n, i, 0

    def k_at(i: Array, n: Array, b: Array) -> tuple[Any, ...]:
        return b, n // plan.group, 0, 0

    keys = (None, None, plan.t, plan.h)
    out, lse = _call(
        plan,
        body,
        "forward",
        (plan.t // bq, plan.n, plan.b),
        [
            (x.ends()[:, None], (None, 1), lambda i, n, b: (b, 0)),
            (_padded(q.astype(k.dtype), plan), (None, None, bq, plan.h), q_at),
            (_padded(k, plan), keys, k_at),
            (_padded(v, plan), keys, k_at),
            (_padded(log_gate.astype(jnp.float32), plan), keys[:3], lambda *at: k_at(*at)[:3]),
        ],
        [
            (_shape(plan.b, plan.n, plan.t, plan.h), (None, None, bq, plan.h), q_at),
            (_shape(plan.b, plan.n, plan.t), (None, None, bq), lambda *at: q_at(*at)[:3]),
        ],
        2,
    )
    return out[:, :, :t, :h], lse[:, :, :t]


def _backward(x: Inputs, above: Above, rule: Rule) -> tuple[Array, ...]:
    (q, k, v, log_gate, _), plan = x, _plan(x, rule, "backward")
    (t, h), ends = q.shape[2:], x.ends()[:, None]
    arrays = (q.astype(k.dtype), k, v, above.d_out.astype(v.dtype), *above[1:], log_gate.astype(jnp.float32))
    padded = [_padded(y, plan) for y in arrays]
    dk, dv, d_gate = _key_gradients(plan, ends, *padded)
    dq = _query_gradient(plan, ends, *padded)
    return dq[:, :, :t, :h], dk[:, :, :t, :h], dv[:, :, :t, :h], d_gate[:, :, :t]


def _key_gradients(
    plan: Plan, ends: Array, q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array, gate: Array
) -> tuple[Array, Array, Array]:
    """dk, dv, d log_gate: one program a block of keys, over all query heads of its KV head."""
    bq, bk, group = plan.bq, plan.bk, plan.group

    def body(
        ends: Any, q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, gate: Any, *outs: Any
    ) -> None:
        j, length = pl.program_id(0), ends[0]
        k_j, v_j, column = k[...], v[...], gate[...][:, None]
        first = (j * bk) // bq
        each = jnp.maximum((length + bq - 1) // bq - first, 0)

        def query_block(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            g, i = jax.lax.div(step, each), first + jax.lax.rem(step, each)
            at = pl.ds(i * bq, bq)
            place = tiles.by_key(i * bq, j * bk, bq, bk, length)
            more = tiles.key_gradients(
                q[g, at, :],
                k_j,
                v_j,
                column,
                d_out[g, at, :],
                lse[g, at][None],
                delta[g, at][None],
                place,
                plan.rule,
            )
            return tuple(a + b for a, b in zip(sums, more))

        zero = jnp.zeros((bk, plan.h), jnp.float32)
        sums = jax.lax.fori_loop(0, group * each, query_block, (zero, zero, jnp.zeros((bk, 1), jnp.float32)))
        outs[0][...], outs[1][...], outs[2][...] = sums[0], sums[1], sums[2].reshape(bk)

    def grouped(x: Array) -> Array:
        return x.reshape(plan.b, plan.heads, group, *x.shape[2:])

    def all_at(j: Array, kv: Array, b: Array) -> tuple[Any, ...]:
        return b, kv, 0, 0, 0

    def k_at(j: Array, kv: Array, b: Array) -> tuple[Any, ...]:
        return b, kv, j, 0

    wide, keys = (None, None, group, plan.t, plan.h), (None, None, bk, plan.h)
    rows = wide[:4], lambda *at: all_at(*at)[:4]
    gates = keys[:3], lambda *at: k_at(*at)[:3]
    shape = _shape(plan.b, plan.heads, plan.t, plan.h)
    return _call(
        plan,
        body,
        "key_gradients",
        (plan.t // bk, plan.heads, plan.b),
        [
            (ends, (None, 1), lambda j, kv, b: (b, 0)),
            (grouped(q), wide, all_at),
            (k, keys, k_at),
            (v, keys, k_at),
            (grouped(d_out), wide, all_at),
            (grouped(lse), *rows),
            (grouped(delta), *rows),
            (gate, *gates),
        ],
        [(shape, keys, k_at), (shape, keys, k_at), (_shape(*shape.shape[:3]), *gates)],
        4,
    )


def _query_gradient(
    plan: Plan, ends: Array, q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array, gate: Array
) -> Array:
    """dq: one program a block of queries."""
    bq, bk = plan.bq, plan.bk

    def body(
        ends: Any, q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, gate: Any, out: Any
    ) -> None:
        i, length = pl.program_id(0), ends[0]
        q_i, do_i, lse_i, delta_i = q[...], d_out[...], lse[...][:, None], delta[...][:, None]

        def key_block(j: Array, dq: Array) -> Array:
            at = pl.ds(j * bk, bk)
            place = tiles.by_query(i * bq, j * bk, bq, bk, length)
            arrays = (q_i, k[at, :], v[at, :], gate[at][None, :], do_i, lse_i, delta_i)
            return dq + tiles.query_gradient(*arrays, place, plan.rule)

        zero = jnp.zeros((bq, plan.h), jnp.float32)
        out[...] = jax.lax.fori_loop(0, _count(plan, i, length), key_block, zero)

    def q_at(i: Array, n: Array, b: Array) -> tuple[Any, ...]:
        return b, n, i, 0

    def k_at(i: Array, n: Array, b: Array) -> tuple[Any, ...]:
        return b, n // plan.group, 0, 0

    wide, keys = (None, None, bq, plan.h), (None, None, plan.t, plan.h)
    rows = wide[:3], lambda *at: q_at(*at)[:3]
    return _call(
        plan,
        body,
        "query_gradient",
        (plan.t // bq, plan.n, plan.b),
        [
            (ends, (None, 1), lambda i, n, b: (b, 0)),
            (q, wide, q_at),
            (k, keys, k_at),
            (v, keys, k_at),
            (d_out, wide, q_at),
            (lse, *rows),
            (delta, *rows),
            (gate, keys[:3], lambda *at: k_at(*at)[:3]),
        ],
        [(_shape(plan.b, plan.n, plan.t, plan.h), wide, q_at)],
        3,
    )[0]


gated = differentiable(_forward, _backward)
