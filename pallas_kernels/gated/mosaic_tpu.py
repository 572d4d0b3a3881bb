"""gated on TPU: the forward pass, and the operation with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as common
from pallas_kernels.gated import mosaic_tpu_grid as grids
from pallas_kernels.gated import tiles
from pallas_kernels.gated.mosaic_tpu_grad import backward
from pallas_kernels.gated.mosaic_tpu_grid import LANES
from pallas_kernels.gated.vjp import GatedSizes, Inputs, Rule, differentiable
from pallas_kernels.padding import pad_to

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def _body(sizes: GatedSizes) -> Any:
    bq, bk = sizes.bq, sizes.bk

    def body(
        ends: Any, q: Any, k: Any, v: Any, gate: Any, out: Any, lse: Any, m: Any, l: Any, o: Any
    ) -> None:
        i, j, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]

        @pl.when(j == 0)
        def _() -> None:
            m[...] = jnp.full_like(m, common.HIDDEN)
            l[...] = jnp.zeros_like(l)
            o[...] = jnp.zeros_like(o)

        @pl.when((j <= grids.last(sizes, i)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_query(i * bq, j * bk, bq, bk, length, LANES)
            stats = (m[...], l[...], o[...])
            m[...], l[...], o[...] = tiles.grow(stats, q[...], k[...], v[...], gate[...], place, sizes.rule)

        @pl.when(j == grids.last(sizes, i))
        def _() -> None:
            out[...], column = common.finish((m[:, :1], l[:, :1], o[...]))
            lse[...] = grids.row(column)

    return body


def _forward(x: Inputs, rule: Rule) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    (q, k, v, log_gate, _), t, sizes = x, x.q.shape[2], grids.sizes_of(x, rule, "forward")
    at = grids.query_major(sizes)
    q_all, k_all, v_all = (pad_to(y, sizes.t) for y in (q.astype(k.dtype), k, v))
    out, lse = grids.call(
        sizes,
        _body(sizes),
        "forward",
        (sizes.b, sizes.n, sizes.nq, sizes.nk),
        x.ends(),
        [(q_all, at.q), (k_all, at.k), (v_all, at.k), (grids.as_rows(log_gate, sizes.t), at.k_row)],
        [
            (grids.shape(sizes.b, sizes.n, sizes.t, sizes.h), at.q),
            (grids.shape(sizes.b, sizes.n, 1, sizes.t), at.q_row),
        ],
        [(sizes.bq, LANES), (sizes.bq, LANES), (sizes.bq, sizes.h)],
        2,
    )
    return out[:, :, :t], lse[:, :, 0, :t]


gated = differentiable(_forward, backward)
