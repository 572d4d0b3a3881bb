"""The decoder's forward pass in training: the mathematics of ``kvjax.models.decoder``, arranged for speed.

Tokens of a batch are one axis, maps that read the same input are one product, every product is bfloat16 in
and float32 out (``products``), the residual stream is float32. Attention, MLP and loss are computed in pieces
that stay in a core's cache, and their backward passes recompute the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.models import decoder
from kvjax.models.layout import inputs_first
from kvjax.models.spec import ModelSpec
from kvjax.types import Params
from train.embedded.attention import attention
from train.embedded.products import HALF, product, rows_by_columns, rows_by_rows, transposed

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

PIECE = 256
"""Tokens of a piece of the MLP and of the loss."""


def states(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    speak: Bool[Array, "B L K"] | None = None,
) -> Float[Array, "M D"]:
    """Tokens to the last layer's output before the final norm, M = B T.

    Args:
      spec: of the qwen2 family: RMS norms, SwiGLU, full attention.
      params: as in ``kvjax.models.decoder``; float32.
      tokens: whole rows, of a length that ``attention`` takes.
      speak: the KV heads that are not silenced in each row; None silences none.
    """
    rows, length = tokens.shape
    x = params["embed"][tokens.reshape(-1)]
    for index, p in enumerate(map(inputs_first, params["layers"])):
        y = product(decoder.norm(spec, p, "attn_norm", x), _joined(spec, p)) + _bias(spec, p)
        y = y.reshape(rows, length, spec.num_kv_heads, -1)
        mixed = attention(y, spec.groups, tuple(map(float, spec.rope.frequencies(spec.head_dim))))
        if speak is not None:
            mixed = mixed * speak[:, None, index, :, None]
        x = x + product(mixed.reshape(rows * length, -1), p["wo"].reshape(-1, spec.model_dim))
        x = x + swiglu(decoder.norm(spec, p, "mlp_norm", x), p["w_gate"], p["w_up"], p["w_down"])
    return x


def _joined(spec: ModelSpec, p: Params) -> Float[Array, "D K(G+2)H"]:
    """Query, key and value maps, those of a KV head beside each other."""
    by_head = (spec.model_dim, spec.num_kv_heads, -1)
    return jnp.concatenate([p[name].reshape(by_head) for name in ("wq", "wk", "wv")], axis=2).reshape(
        spec.model_dim, -1
    )


def _bias(spec: ModelSpec, p: Params) -> Float[Array, " K(G+2)H"]:
    return jnp.concatenate(
        [p[name].reshape(spec.num_kv_heads, -1) for name in ("bq", "bk", "bv")], 1
    ).reshape(-1)


def _piece(tokens: int) -> int:
    return PIECE if tokens % PIECE == 0 else tokens


@jax.custom_vjp
def swiglu(
    h: Float[Array, "M D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], down: Float[Array, "F D"]
) -> Float[Array, "M D"]:
    """silu(h gate) * (h up), times down."""
    return _swiglu_forward(h, gate, up, down)[0]


def _swiglu_forward(h: Array, gate: Array, up: Array, down: Array) -> tuple[Array, tuple[Array, ...]]:
    half = tuple(x.astype(HALF) for x in (h, gate, up, down))

    def one(piece: Array) -> Array:
        inner = jax.nn.silu(rows_by_columns(piece, half[1])) * rows_by_columns(piece, half[2])
        return rows_by_columns(inner.astype(HALF), half[3])

    pieces = half[0].reshape(-1, _piece(len(h)), h.shape[1])
    return jax.lax.map(one, pieces).reshape(h.shape), half


def _swiglu_backward(saved: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    h, gate, up, down = saved
    dy = dy.astype(HALF)

    def one(piece: tuple[Array, Array]) -> tuple[Array, ...]:
        x, back = piece
        a, b = rows_by_columns(x, gate), rows_by_columns(x, up)
        share = jax.nn.sigmoid(a)
        soft = a * share
        inner = (soft * b).astype(HALF)
        d = rows_by_rows(back, down)
        da = (d * b * (share + soft * (1 - share))).astype(HALF)
        db = (d * soft).astype(HALF)
        return rows_by_rows(da, gate) + rows_by_rows(db, up), inner, da, db

    shape = (-1, _piece(len(h)), h.shape[1])
    dx, *parts = jax.lax.map(one, (h.reshape(shape), dy.reshape(shape)))
    inner, da, db = (x.reshape(len(h), -1) for x in parts)
    across = transposed(h)
    return (
        dx.reshape(h.shape),
        rows_by_columns(across, da),
        rows_by_columns(across, db),
        rows_by_columns(transposed(inner), dy),
    )


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def cross_entropy(
    x: Float[Array, "S D"], embed: Float[Array, "V D"], target: Int[Array, " S"]
) -> tuple[Float[Array, " S"], Bool[Array, " S"]]:
    """(negative log likelihood of each target under the logits x embed^T, whether it is the likeliest)."""
    return _entropy_forward(x, embed, target)[0]


def _entropy_forward(x: Array, embed: Array, target: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    a, table = x.astype(HALF), embed.astype(HALF)

    def one(piece: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        z = rows_by_rows(piece[0], table)
        most = jnp.max(z, axis=-1)
        norm = most + jnp.log(jnp.sum(jnp.exp(z - most[:, None]), axis=-1))
        target_logit = jnp.take_along_axis(z, piece[1][:, None], axis=1)[:, 0]
        return norm, norm - target_logit, target_logit >= most

    size = _piece(len(x))
    parts = jax.lax.map(one, (a.reshape(-1, size, a.shape[1]), target.reshape(-1, size)))
    norm, nll, right = (part.reshape(-1) for part in parts)
    return (nll, right), (a, table, target, norm)


def _entropy_backward(saved: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array, Array, None]:
    a, table, target, norm = saved
    size = _piece(len(a))

    def one(dt: Array, piece: tuple[Array, ...]) -> tuple[Array, Array]:
        x, wanted, total, weight = piece
        change = jnp.exp(rows_by_rows(x, table) - total[:, None])
        hit = wanted[:, None] == jnp.arange(len(table))
        change = ((change - hit) * weight[:, None]).astype(HALF)
        return dt + rows_by_columns(transposed(change), x), rows_by_columns(change, table)

    pieces = tuple(x.reshape(-1, size, *x.shape[1:]) for x in (a, target, norm, cotangents[0]))
    dt, dx = jax.lax.scan(one, jnp.zeros(table.shape), pieces)
    return dx.reshape(a.shape), dt, None


cross_entropy.defvjp(_entropy_forward, _entropy_backward)
