"""One decoder for the Llama and Qwen2 families, as plain functions on leaves.

The seam is ``attend``: each layer hands it q and k before and after RoPE, v and the input of the
attention block, and gets the mixed values back. A token walks in through ``embed``, through
``layer`` L times, and out through ``logits``; caches live entirely behind the seam.

Params, a dict (any dtype; shapes in the letters of ``kvjax.types``):

  embed [V, D]   final_norm [D]   head [D, V] (absent when tied)
  layers: a list of L dicts
    attn_norm [D]   wq [D, N, H]   wk, wv [D, K, H]   wo [N, H, D]   (bq [N, H]   bk, bv [K, H])
    mlp_norm [D]    w_gate, w_up [D, F]   w_down [F, D]
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.models.spec import ModelSpec
from kvjax.types import AttendFn, C, Heads, Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def shapes(spec: ModelSpec) -> dict[str, Any]:
    """The params tree with a shape tuple in place of every array."""
    d, n, k, h, f = spec.model_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.mlp_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "wq": (d, n, h),
        "wk": (d, k, h),
        "wv": (d, k, h),
        "wo": (n, h, d),
        "mlp_norm": (d,),
        "w_gate": (d, f),
        "w_up": (d, f),
        "w_down": (f, d),
    }
    if spec.qkv_bias:
        layer |= {"bq": (n, h), "bk": (k, h), "bv": (k, h)}
    tree: dict[str, Any] = {"embed": (spec.vocab_size, d), "final_norm": (d,)}
    tree["layers"] = [dict(layer) for _ in range(spec.num_layers)]
    if not spec.tied:
        tree["head"] = (d, spec.vocab_size)
    return tree


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) * weight; statistics in float32, result in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], frequencies: Float[Array, " H/2"]
) -> Float[Array, "B T N H"]:
    """Turn each (i, i + H/2) pair of x by its position times the pair's frequency."""
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def project(spec: ModelSpec, p: Params, hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Heads:
    """The attention input to queries, keys and values, before and after RoPE."""
    q = jnp.einsum("btd,dnh->btnh", hidden, p["wq"])
    k = jnp.einsum("btd,dkh->btkh", hidden, p["wk"])
    v = jnp.einsum("btd,dkh->btkh", hidden, p["wv"])
    if spec.qkv_bias:
        q, k, v = q + p["bq"], k + p["bk"], v + p["bv"]
    freq = jnp.asarray(spec.rope.frequencies(spec.head_dim))
    return Heads(
        q=rotate(q, positions, freq), k=rotate(k, positions, freq), v=v, q_pre=q, k_pre=k, hidden=hidden
    )


def layer(
    spec: ModelSpec,
    p: Params,
    index: int,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: AttendFn[C],
    carry: C,
) -> tuple[Float[Array, "B T D"], C]:
    """One block: x + attention(norm x), then x + mlp(norm x)."""
    heads = project(spec, p, rms_norm(x, p["attn_norm"], spec.norm_eps), positions)
    mixed, carry = attend(index, heads, carry)
    x = x + jnp.einsum("btnh,nhd->btd", mixed.astype(x.dtype), p["wo"])
    y = rms_norm(x, p["mlp_norm"], spec.norm_eps)
    gate = jax.nn.silu(jnp.einsum("btd,df->btf", y, p["w_gate"]))
    up = jnp.einsum("btd,df->btf", y, p["w_up"])
    return x + jnp.einsum("btf,fd->btd", gate * up, p["w_down"]), carry


def embed(p: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Token ids to vectors."""
    return p["embed"][tokens]


def logits(spec: ModelSpec, p: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Final norm and output projection; float32."""
    y = rms_norm(x, p["final_norm"], spec.norm_eps)
    head = p["embed"].T if spec.tied else p["head"]
    return jnp.einsum("...d,dv->...v", y, head, preferred_element_type=jnp.float32)


def forward(
    spec: ModelSpec,
    p: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: AttendFn[C],
    carry: C,
) -> tuple[Float[Array, "B T D"], C]:
    """Tokens to the last layer's output (before the final norm), through the seam.

    Args:
      spec: static sizes.
      p: params as in the module docstring.
      tokens: ids; padding may hold any id, its outputs are garbage to be ignored.
      positions: absolute position of each token.
      attend: the seam.
      carry: threaded through every layer's ``attend``.
    """
    x = embed(p, tokens)
    for index, weights in enumerate(p["layers"]):
        x, carry = layer(spec, weights, index, x, positions, attend, carry)
    return x, carry


def dense_attend(spec: ModelSpec) -> AttendFn[None]:
    """The model's own attention over all T tokens given at once: causal, sliding where it says so.

    Materialises [B, N, T, T]: for training at small T, and the reference for every cache.
    """

    def attend(index: int, x: Heads, carry: None) -> tuple[Array, None]:
        b, t, n, h = x.q.shape
        q = x.q.reshape(b, t, spec.num_kv_heads, spec.groups, h)
        s = jnp.einsum("btkgh,bskh->bkgts", q, x.k, preferred_element_type=jnp.float32) * h**-0.5
        age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        window = spec.windows[index]
        visible = (age >= 0) if window is None else (age >= 0) & (age < window)
        p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1).astype(x.v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", p, x.v).reshape(b, t, n, h), carry

    return attend


def dense_logits(spec: ModelSpec, p: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of whole sequences by dense attention; positions 0 .. T-1."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = forward(spec, p, tokens, positions, dense_attend(spec), None)
    return logits(spec, p, x)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions above for one spec: what the decode loop takes as its network."""

    spec: ModelSpec

    @property
    def num_layers(self) -> int:
        """L."""
        return self.spec.num_layers

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        """H."""
        return self.spec.head_dim

    @property
    def max_positions(self) -> int:
        """The longest sequence the model was trained for."""
        return self.spec.max_positions

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the model's own sliding window, or None."""
        return self.spec.windows

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token ids to vectors."""
        return embed(params, tokens)

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        """One block."""
        return layer(self.spec, params, index, x, positions, attend, carry)

    def logits(self, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Final norm and output projection; float32."""
        return logits(self.spec, params, x)
