"""gated on TPU: the backward pass, one grid for the gradients of keys and one for those of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated import mosaic_tpu_plan as planning
from pallas_kernels.gated import tiles
from pallas_kernels.gated.mosaic_tpu_plan import LANES
from pallas_kernels.gated.plan import Plan

if TYPE_CHECKING:
    from jaxtyping import Array

    from pallas_kernels.gated.vjp import Above, Inputs, Rule


def _key_body(plan: Plan) -> Any:
    bq, bk = plan.bq, plan.bk

    def body(ends: Any, *refs: Any) -> None:
        q, k, v, d_out, lse, delta, gate, dk_out, dv_out, gate_out, dk, dv, d_gate, gate_column = refs
        j, step, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]
        i = jax.lax.rem(step, plan.nq)

        @pl.when(step == 0)
        def _() -> None:
            for total in (dk, dv, d_gate):
                total[...] = jnp.zeros_like(total)
            gate_column[...] = planning.column(gate[...])

        @pl.when((i >= planning.first(plan, j)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_key(i * bq, j * bk, bq, bk, length, LANES)
            arrays = (q[...], k[...], v[...], gate_column[...], d_out[...], lse[...], delta[...])
            more = tiles.key_gradients(*arrays, place, plan.rule)
            dk[...] += more[0]
            dv[...] += more[1]
            d_gate[...] += jnp.broadcast_to(more[2], d_gate.shape)

        @pl.when(step == plan.group * plan.nq - 1)
        def _() -> None:
            dk_out[...] = dk[...]
            dv_out[...] = dv[...]
            gate_out[...] = jnp.transpose(d_gate[...])[:1]

    return body


def _query_body(plan: Plan) -> Any:
    bq, bk = plan.bq, plan.bk

    def body(ends: Any, *refs: Any) -> None:
        q, k, v, d_out, lse, delta, gate, out, dq, lse_column, delta_column = refs
        i, j, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]

        @pl.when(j == 0)
        def _() -> None:
            dq[...] = jnp.zeros_like(dq)
            lse_column[...] = planning.column(lse[...])
            delta_column[...] = planning.column(delta[...])

        @pl.when((j <= planning.last(plan, i)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_query(i * bq, j * bk, bq, bk, length, LANES)
            arrays = (q[...], k[...], v[...], gate[...], d_out[...], lse_column[...], delta_column[...])
            dq[...] += tiles.query_gradient(*arrays, place, plan.rule)

        @pl.when(j == planning.last(plan, i))
        def _() -> None:
            out[...] = dq[...]

    return body


def backward(x: Inputs, above: Above, rule: Rule) -> tuple[Array, ...]:
    """See ``vjp.differentiable``."""
    (q, k, v, log_gate, _), t, plan = x, x.q.shape[2], planning.plan_of(x, rule, "backward")
    bq, bk, h = plan.bq, plan.bk, plan.h
    wide = [planning.padded(y, plan.t) for y in (q.astype(k.dtype), k, v, above.d_out.astype(v.dtype))]
    rows = [planning.as_rows(y, plan.t) for y in (*above[1:], log_gate)]
    ends = x.ends()

    def run(body: Any, name: str, grid: Any, at: Any, outputs: Any, scratch: Any, products: int) -> Any:
        specs = (at.q, at.k, at.k, at.q, at.q_row, at.q_row, at.k_row)
        inputs = list(zip((*wide, *rows), specs))
        return planning.call(plan, body, name, grid, ends, inputs, outputs, scratch, products)

    at = planning.key_major(plan)
    keys = planning.shape(plan.b, plan.heads, plan.t, h)
    gates = planning.shape(plan.b, plan.heads, 1, plan.t)
    dk, dv, d_gate = run(
        _key_body(plan),
        "key_gradients",
        (plan.b, plan.heads, plan.nk, plan.group * plan.nq),
        at,
        [(keys, at.k), (keys, at.k), (gates, at.k_row)],
        [(bk, h), (bk, h), (bk, LANES), (bk, LANES)],
        4,
    )
    at = planning.query_major(plan)
    (dq,) = run(
        _query_body(plan),
        "query_gradient",
        (plan.b, plan.n, plan.nq, plan.nk),
        at,
        [(planning.shape(plan.b, plan.n, plan.t, h), at.q)],
        [(bq, h), (bq, LANES), (bq, LANES)],
        3,
    )
    return dq[:, :, :t], dk[:, :, :t], dv[:, :, :t], d_gate[:, :, 0, :t]
