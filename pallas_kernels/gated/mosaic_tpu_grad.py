"""gated on TPU: the backward pass, one grid for the gradients of keys and one for those of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.blockwise.mosaic_tpu import column
from pallas_kernels.gated import mosaic_tpu_grid as grids
from pallas_kernels.gated import tiles
from pallas_kernels.gated.mosaic_tpu_grid import LANES
from pallas_kernels.gated.vjp import Above, GatedSizes, Inputs, Rule
from pallas_kernels.padding import pad_to

if TYPE_CHECKING:
    from jaxtyping import Array


def _key_body(sizes: GatedSizes) -> Any:
    bq, bk = sizes.bq, sizes.bk

    def body(ends: Any, *refs: Any) -> None:
        q, k, v, d_out, lse, delta, gate, dk_out, dv_out, gate_out, dk, dv, d_gate, gate_column = refs
        j, step, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]
        i = jax.lax.rem(step, sizes.nq)

        @pl.when(step == 0)
        def _() -> None:
            for total in (dk, dv, d_gate):
                total[...] = jnp.zeros_like(total)
            gate_column[...] = column(gate[...])

        @pl.when((i >= grids.first(sizes, j)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_key(i * bq, j * bk, bq, bk, length, LANES)
            arrays = (q[...], k[...], v[...], gate_column[...], d_out[...], lse[...], delta[...])
            more = tiles.key_gradients(*arrays, place, sizes.rule)
            dk[...] += more[0]
            dv[...] += more[1]
            d_gate[...] += jnp.broadcast_to(more[2], d_gate.shape)

        @pl.when(step == sizes.group * sizes.nq - 1)
        def _() -> None:
            dk_out[...] = dk[...]
            dv_out[...] = dv[...]
            gate_out[...] = jnp.transpose(d_gate[...])[:1]

    return body


def _query_body(sizes: GatedSizes) -> Any:
    bq, bk = sizes.bq, sizes.bk

    def body(ends: Any, *refs: Any) -> None:
        q, k, v, d_out, lse, delta, gate, out, dq, lse_column, delta_column = refs
        i, j, length = pl.program_id(2), pl.program_id(3), ends[pl.program_id(0)]

        @pl.when(j == 0)
        def _() -> None:
            dq[...] = jnp.zeros_like(dq)
            lse_column[...] = column(lse[...])
            delta_column[...] = column(delta[...])

        @pl.when((j <= grids.last(sizes, i)) & (i * bq < length))
        def _() -> None:
            place = tiles.by_query(i * bq, j * bk, bq, bk, length, LANES)
            arrays = (q[...], k[...], v[...], gate[...], d_out[...], lse_column[...], delta_column[...])
            dq[...] += tiles.query_gradient(*arrays, place, sizes.rule)

        @pl.when(j == grids.last(sizes, i))
        def _() -> None:
            out[...] = dq[...]

    return body


def backward(x: Inputs, above: Above, rule: Rule) -> tuple[Array, ...]:
    """See ``vjp.differentiable``."""
    (q, k, v, log_gate, _), t, sizes = x, x.q.shape[2], grids.sizes_of(x, rule, "backward")
    bq, bk, h = sizes.bq, sizes.bk, sizes.h
    wide = [pad_to(y, sizes.t) for y in (q.astype(k.dtype), k, v, above.d_out.astype(v.dtype))]
    rows = [grids.as_rows(y, sizes.t) for y in (*above[1:], log_gate)]
    ends = x.ends()

    def run(body: Any, name: str, grid: Any, at: Any, outputs: Any, scratch: Any, products: int) -> Any:
        specs = (at.q, at.k, at.k, at.q, at.q_row, at.q_row, at.k_row)
        inputs = list(zip((*wide, *rows), specs))
        return grids.call(sizes, body, name, grid, ends, inputs, outputs, scratch, products)

    at = grids.key_major(sizes)
    keys = grids.shape(sizes.b, sizes.heads, sizes.t, h)
    gates = grids.shape(sizes.b, sizes.heads, 1, sizes.t)
    dk, dv, d_gate = run(
        _key_body(sizes),
        "key_gradients",
        (sizes.b, sizes.heads, sizes.nk, sizes.group * sizes.nq),
        at,
        [(keys, at.k), (keys, at.k), (gates, at.k_row)],
        [(bk, h), (bk, h), (bk, LANES), (bk, LANES)],
        4,
    )
    at = grids.query_major(sizes)
    (dq,) = run(
        _query_body(sizes),
        "query_gradient",
        (sizes.b, sizes.n, sizes.nq, sizes.nk),
        at,
        [(grids.shape(sizes.b, sizes.n, sizes.t, h), at.q)],
        [(bq, h), (bq, LANES), (bq, LANES)],
        3,
    )
    return dq[:, :, :t], dk[:, :, :t], dv[:, :, :t], d_gate[:, :, 0, :t]
