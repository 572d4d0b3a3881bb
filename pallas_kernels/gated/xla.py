"""gated in plain XLA: two passes over those pairs of blocks that causality leaves.

Batch and KV heads stay array axes, so that a training step may shard them. The backward pass computes
each block of scores once and adds to dq in place as it goes through the key blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import products, softmax
from pallas_kernels.blockwise.cut import blocks, joined
from pallas_kernels.gated.ref import seen
from pallas_kernels.gated.vjp import Above, Inputs, Rule, differentiable

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Stats = tuple["Array", "Array", "Array"]
"""(m, l, o), as in ``softmax``."""

BLOCKS = 256, 512
"""Queries and keys of a tile."""


def _grouped(x: Array, heads: int) -> Array:
    """[B, N, ...] to [B, K, G, ...]."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _zeros(shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape, jnp.float32)


def _product(spec: str, a: Array, b: Array) -> Array:
    """In the dtype of b with float32 sums."""
    return jnp.einsum(
        spec,
        a.astype(b.dtype),
        b,
        precision=products.precision(b.dtype),
        preferred_element_type=jnp.float32,
    )


def _scores(
    q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], rule: Rule
) -> Float[Array, "B K G T S"]:
    b, heads, g, t, h = q.shape
    s = products.scores(q.reshape(b, heads, g * t, h), k, rule.scale).reshape(b, heads, g, t, -1)
    return softmax.cap(s, rule.softcap)


def _biased(
    s: Float[Array, "B K G T S"],
    log_gate: Float[Array, "B K S"],
    i: Int[Array, " T"],
    j: Int[Array, " S"],
    lengths: Int[Array, " B"] | None,
    rule: Rule,
) -> tuple[Float[Array, "B K G T S"], Bool[Array, "T S"]]:
    """Scores with the bias of keys outside the window and nothing hidden left, and which keys are outside."""
    far = i[:, None] - j[None, :] >= rule.window
    s = s + jnp.where(far, log_gate[:, :, None, None, :], 0.0)
    return softmax.hide(s, seen(i, j, lengths)), far


def _forward(x: Inputs, rule: Rule) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    q, k, v, log_gate, lengths = x
    (b, n, t, h), heads = q.shape, k.shape[1]
    bq, bk = (min(size, t) for size in BLOCKS)
    qs = blocks(_grouped(q, heads), 3, bq, 0)
    ks, vs, gates = (blocks(y, 2, bk, 0) for y in (k, v, log_gate.astype(jnp.float32)))
    live = t if lengths is None else jnp.max(lengths)

    def query_block(y: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i, start = y
        i = start + jnp.arange(bq)

        def key_block(j: Int[Array, ""], mlo: Stats) -> Stats:
            s, _ = _biased(_scores(q_i, ks[j], rule), gates[j], i, j * bk + jnp.arange(bk), lengths, rule)
            return softmax.grow(*mlo, s, lambda p: _product("bkgts,bksh->bkgth", p, vs[j]))

        row = q_i.shape[:-1]
        empty = jnp.full(row, -jnp.inf, jnp.float32), _zeros(row), _zeros(q_i.shape)
        count = jnp.where(start < live, (start + bq - 1) // bk + 1, 0)
        return softmax.finish(*jax.lax.fori_loop(0, jnp.minimum(count, len(ks)), key_block, empty))

    out, lse = jax.lax.map(query_block, (qs, jnp.arange(len(qs)) * bq))
    return joined(out, 3, t).reshape(b, n, t, h), joined(lse, 3, t).reshape(b, n, t)


def _backward(x: Inputs, above: Above, rule: Rule) -> tuple[Array, ...]:
    q, k, v, log_gate, lengths = x
    t, heads = q.shape[2], k.shape[1]
    bq, bk = (min(size, t) for size in BLOCKS)
    rows = [blocks(_grouped(y, heads), 3, bq, 0) for y in (q, above.d_out.astype(v.dtype), *above[1:])]
    columns = [blocks(y, 2, bk, 0) for y in (k, v, log_gate.astype(jnp.float32))]
    live = t if lengths is None else jnp.max(lengths)
    stop = (live + bq - 1) // bq

    def key_block(dq: Array, y: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        k_j, v_j, gate_j, start = y
        j = start + jnp.arange(bk)

        def query_block(c: Int[Array, ""], sums: tuple[Array, ...]) -> tuple[Array, ...]:
            dq, dk, dv, dgate = sums
            q_i, do_i, lse_i, delta_i = (z[c] for z in rows)
            capped = _scores(q_i, k_j, rule)
            s, far = _biased(capped, gate_j, c * bq + jnp.arange(bq), j, lengths, rule)
            p = softmax.query_weights(s, lse_i)
            ds = p * (_product("bkgth,bksh->bkgts", do_i, v_j) - delta_i[..., None])
            dgate += jnp.sum(jnp.where(far, ds, 0.0), axis=(2, 3))
            dv += _product("bkgts,bkgth->bksh", p, do_i)
            ds *= rule.scale if rule.softcap is None else rule.scale * (1 - (capped / rule.softcap) ** 2)
            dk += _product("bkgts,bkgth->bksh", ds, q_i)
            return dq.at[c].add(_product("bkgts,bksh->bkgth", ds, k_j)), dk, dv, dgate

        zero = _zeros(k_j.shape), _zeros(v_j.shape), _zeros(gate_j.shape)
        dq, *sums = jax.lax.fori_loop(start // bq, stop, query_block, (dq, *zero))
        return dq, tuple(sums)

    starts = jnp.arange(len(columns[0])) * bk
    dq, sums = jax.lax.scan(key_block, _zeros(rows[0].shape), (*columns, starts))
    return joined(dq, 3, t).reshape(q.shape), *(joined(y, 2, t) for y in sums)


gated = differentiable(_forward, _backward)
