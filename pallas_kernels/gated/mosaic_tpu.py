"""gated on TPU: the forward pass, and the operation with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as common
from pallas_kernels.gated import mosaic_tpu_plan as planning
from pallas_kernels.gated import tiles
from pallas_kernels.gated.mosaic_tpu_grad import backward
from pallas_kernels.gated.mosaic_tpu_plan import LANES
from pallas_kernels.gated.plan import Plan
from pallas_kernels.gated.vjp import Inputs, Rule, differentiable

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def _body(plan: Plan) -> Any:
    bq, bk = plan.bq, plan.bk

    def body(
        ends: Any, q: Any, k: Any, v: Any, gate: Any, out: Any, lse: Any, m: Any, l: Any, o: Any
    ) -> None:
        i, j, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]

        @pl.when(j == 0)
        def _() -> None:
            m[...] = jnp.full_like(m, common.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)

        @pl.when((j <= planning.last(plan, i)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_query(i * bq, j * bk, bq, bk, length, LANES)
            stats = (m[...], l[...], o[...])
            m[...], l[...], o[...] = tiles.grow(stats, q[...], k[...], v[...], gate[...], place, plan.rule)

        @pl.when(j == planning.last(plan, i))
        def _() -> None:
            out[...], column = common.finish((m[:, :1], l[:, :1], o[...]))
            lse[...] = planning.row(column)

    return body


def _forward(x: Inputs, rule: Rule) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    (q, k, v, log_gate, _), t, plan = x, x.q.shape[2], planning.plan_of(x, rule, "forward")
    at = planning.query_major(plan)
    q_all, k_all, v_all = (planning.padded(y, plan.t) for y in (q.astype(k.dtype), k, v))
    out, lse = planning.call(
        plan,
        _body(plan),
        "forward",
        (plan.b, plan.n, plan.nq, plan.nk),
        x.ends(),
        [(q_all, at.q), (k_all, at.k), (v_all, at.k), (planning.as_rows(log_gate, plan.t), at.k_row)],
        [
            (planning.shape(plan.b, plan.n, plan.t, plan.h), at.q),
            (planning.shape(plan.b, plan.n, 1, plan.t), at.q_row),
        ],
        [(plan.bq, LANES), (plan.bq, LANES), (plan.bq, plan.h)],
        2,
    )
    return out[:, :, :t], lse[:, :, 0, :t]


gated = differentiable(_forward, backward)
