"""One decoder for all families, as plain functions on leaves.

Each layer calls ``attend`` with q and k before and after RoPE, v and the input of the attention block, and
gets the mixed values back; caches live entirely in there. A token goes through ``embed``, L times ``layer``,
and ``logits``. Each difference between families is a static field of ``ModelSpec``.

Params, a dict (any dtype; shapes in the letters of ``kvjax.types``; in brackets what some have):

  embed [V, D]   final_norm [D]   (positions [max, D]   final_norm_bias [D]   head [V, D])
  layers: a list of L dicts
    wq [N, H, D]   wk, wv [K, H, D]   wo [D, N, H]   w_up [F, D]   w_down [D, F]   (w_gate [F, D])
    (attn_norm, mlp_norm [D]   attn_norm_bias, mlp_norm_bias [D]   attn_post_norm, mlp_post_norm [D]
     bq [N, H]   bk, bv [K, H]   bo, b_down [D]   b_up [F]   q_norm, k_norm [H]   sinks [N]
     q_joint_norm [N, H]   k_joint_norm [K, H])
    with experts, instead of w_gate, w_up, w_down and their biases:
    router [E, D]   experts_gate, experts_up [E, F, D]   experts_down [E, D, F]
    (router_bias [E]   experts_gate_bias, experts_up_bias [E, F]   experts_down_bias [E, D])

Matrices may be ``Quantised``; norms, biases, routers and positions never are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.models.activations import gated
from kvjax.models.experts import route, through_experts
from kvjax.models.layout import INPUTS_FIRST
from kvjax.models.quantised import Quantised, rows_of, times, widened
from kvjax.models.rope import rotate
from kvjax.models.spec import ModelSpec
from kvjax.sharding.all_heads import HERE, AllHeads
from kvjax.sharding.mesh import ONE, Mesh
from kvjax.types import AttendFn, C, Heads, Params, pytree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def shapes(spec: ModelSpec) -> dict[str, Any]:
    """The params tree with a shape tuple in place of every array."""
    d = spec.model_dim
    tree: dict[str, Any] = {"embed": (spec.vocab_size, d), "final_norm": (d,)}
    if spec.norm == "layer":
        tree["final_norm_bias"] = (d,)
    if spec.positions == "learned":
        tree["positions"] = (spec.max_positions, d)
    tree["layers"] = [_layer_shapes(spec, index) for index in range(spec.num_layers)]
    if not spec.tied:
        tree["head"] = (spec.vocab_size, d)
    return tree


def _layer_shapes(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    d, n, k, h, f = spec.model_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.mlp_dim
    layer: dict[str, tuple[int, ...]] = {
        **({"attn_norm": (d,)} if spec.pre_norms else {}),
        "wq": (n, h, d),
        "wk": (k, h, d),
        "wv": (k, h, d),
        "wo": (d, n, h),
        **({"mlp_norm": (d,)} if spec.pre_norms else {}),
    }
    experts = spec.experts
    if experts is None or index in experts.dense_layers:
        matrices = {"w_gate": (f, d), "w_up": (f, d), "w_down": (d, f)}
        biases: dict[str, tuple[int, ...]] = {"b_up": (f,), "b_down": (d,)}
        if spec.mlp == "gelu":
            del matrices["w_gate"]
        layer |= matrices
    else:
        e, f = experts.count, experts.width
        layer |= {"router": (e, d), "experts_gate": (e, f, d), "experts_up": (e, f, d)}
        layer |= {"experts_down": (e, d, f)}
        biases = {"router_bias": (e,), "experts_gate_bias": (e, f), "experts_up_bias": (e, f)}
        biases |= {"experts_down_bias": (e, d)}
    if spec.qkv_bias:
        layer |= {"bq": (n, h), "bk": (k, h), "bv": (k, h)}
    if spec.linear_bias:
        layer |= {"bo": (d,), **biases}
    if spec.sinks:
        layer |= {"sinks": (n,)}
    if spec.qk_norm:
        layer |= {"q_norm": (h,), "k_norm": (h,)}
    if spec.joint_qk_norm:
        layer |= {"q_joint_norm": (n, h), "k_joint_norm": (k, h)}
    if spec.post_norms:
        layer |= {"attn_post_norm": (d,), "mlp_post_norm": (d,)}
    if spec.norm == "layer":
        layer |= {"attn_norm_bias": (d,), "mlp_norm_bias": (d,)}
    return layer


LETTERS = {
    **dict.fromkeys(("embed", "head"), "VD"),
    **dict.fromkeys(("wk", "wv"), "KHD"),
    **dict.fromkeys(("bk", "bv", "k_joint_norm"), "KH"),
    **dict.fromkeys(("bq", "q_joint_norm"), "NH"),
    **dict.fromkeys(("w_gate", "w_up"), "FD"),
    **{"wq": "NHD", "wo": "DNH", "w_down": "DF", "b_up": "F", "sinks": "N"},
    **dict.fromkeys(("experts_gate", "experts_up"), "EFD"),
    **dict.fromkeys(("experts_gate_bias", "experts_up_bias"), "EF"),
    **{"experts_down": "EDF", "experts_down_bias": "ED"},
}
"""Dimensions of the leaves that are sharded where a model lies on several devices."""


def letters(params: Params) -> Params:
    """The dimensions of every leaf in the letters of ``kvjax.types``; "" for leaves that are never cut."""

    def of(path: Any, _: Any) -> str:
        name = next(part.key for part in reversed(path) if hasattr(part, "key"))  # codes have their leaf's
        return LETTERS.get(name, "")

    return jax.tree_util.tree_map_with_path(of, params)


def norm(spec: ModelSpec, p: Params, name: str, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """x normalised over its last axis by the weights ``name``; computed in float32, in x's dtype."""
    y, weight = x.astype(jnp.float32), p[name].astype(jnp.float32)
    if spec.norm == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + spec.norm_eps)
    if spec.norm == "rms_plus_one":
        weight = 1.0 + weight
    y = y * weight
    if spec.norm == "layer":
        y = y + p[f"{name}_bias"].astype(jnp.float32)
    return y.astype(x.dtype)


def joint_norm(
    spec: ModelSpec, weight: Float[Array, "N H"], x: Float[Array, "B T N H"], heads: AllHeads = HERE
) -> Float[Array, "B T N H"]:
    """x over the root of its mean square over all heads; computed in float32, in x's dtype.

    Args:
      spec: has the epsilon.
      weight: of the heads that are here.
      x: queries or keys of these heads.
      heads: where the others are, inside ``shard_map``; elsewhere the compiler adds over devices.
    """
    y = x.astype(jnp.float32)
    square = heads.mean(jnp.moveaxis(jnp.mean(y * y, axis=-1), 2, 1))  # [B, 1, T]
    y = y * jax.lax.rsqrt(jnp.moveaxis(square, 1, 2)[..., None] + spec.norm_eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def softcap(x: Float[Array, "... X"], limit: float | None) -> Float[Array, "... X"]:
    """x squeezed smoothly into (-limit, limit)."""
    return x if limit is None else limit * jnp.tanh(x / limit)


def product(x: Float[Array, "B T X"], weight: Float[Array, "... X"] | Quantised) -> Float[Array, "B T ..."]:
    """x times a weight, in x's dtype; sums in float32."""
    if isinstance(weight, Quantised):
        return times(x, weight).astype(x.dtype)
    if x.dtype == jnp.float32:
        return _dot(x, weight)
    if x.shape[1] > 1:
        return _in_float32(x, weight).astype(x.dtype)
    return jax.lax.platform_dependent(
        x, weight, cpu=lambda x, weight: _in_float32(x, weight).astype(x.dtype), default=_dot
    )


def _dot(x: Float[Array, "B ... X"], weight: Float[Array, "... X"], dtype: Any = None) -> Array:
    """x times a weight over its last axis, as a matrix: of three axes XLA on a CPU writes it transposed."""
    matrix = weight.reshape(-1, weight.shape[-1])
    y = jnp.einsum("...x,ox->...o", x, matrix, preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def _in_float32(x: Float[Array, "B ... X"], weight: Float[Array, "... X"]) -> Array:
    """x [B, ..., X] times a weight with an axis X, with a float32 result.

    From two rows on, XLA on a CPU reads a bfloat16 weight as it lies. For one row, or for a bfloat16 result,
    it writes the whole weight out in float32 first; so one row goes there twice. XLA of jax 0.7 has no such
    kernel: it reads a weight as it lies for one row of less than 4,096 inputs, and for no other. Of several
    rows and tokens it compiles the product and cannot run it, so operands are float32 there.
    """
    plain = functools.partial(_dot, dtype=jnp.float32)
    several, old = x.size > x.shape[-1], jax.__version_info__ < (0, 8)
    if x.dtype == jnp.float32 or several != old:
        return plain(x, weight)

    def wide(x: Array, weight: Array) -> Array:
        return plain(x.astype(jnp.float32), weight.astype(jnp.float32))

    def twice(x: Array, weight: Array) -> Array:
        return plain(jnp.broadcast_to(x, (2, *x.shape[1:])), weight)[:1]

    return jax.lax.platform_dependent(x, weight, cpu=wide if several else twice, default=plain)


def queries(
    spec: ModelSpec, p: Params, hidden: Float[Array, "B T D"], heads: AllHeads = HERE
) -> Float[Array, "B T N H"]:
    """The attention input to queries before RoPE: bias, q-norm and gain where the family has them."""
    q = product(hidden, p["wq"])
    if spec.qkv_bias:
        q = q + p["bq"]
    if spec.qk_norm:
        q = norm(spec, p, "q_norm", q)
    if spec.joint_qk_norm:
        q = joint_norm(spec, p["q_joint_norm"], q, heads)
    if spec.query_gain != 1.0:  # so that every ``attend`` may divide scores by sqrt(H)
        q = q * jnp.asarray(spec.query_gain, q.dtype)
    return q


def project(
    spec: ModelSpec, p: Params, index: int, hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]
) -> Heads:
    """The attention input to queries, keys and values, before and after RoPE."""
    q = queries(spec, p, hidden)
    k = product(hidden, p["wk"])
    v = product(hidden, p["wv"])
    if spec.qkv_bias:
        k, v = k + p["bk"], v + p["bv"]
    if spec.qk_norm:
        k = norm(spec, p, "k_norm", k)
    if spec.joint_qk_norm:
        k = joint_norm(spec, p["k_joint_norm"], k)
    rope = spec.rope_of(index)
    to_position = None if rope is None else functools.partial(rotate, rope=rope)
    turned = (q, k) if to_position is None else (to_position(q, positions), to_position(k, positions))
    of_queries: Params = {name: p[name] for name in ("wq", "bq", "q_norm", "q_joint_norm") if name in p}
    return Heads(
        q=turned[0],
        k=turned[1],
        v=v,
        q_pre=q,
        k_pre=k,
        hidden=hidden,
        softcap=spec.attn_softcap,
        rotate=to_position,
        project=Projection(spec=spec, weights=of_queries),
        wo=widened(p["wo"]) if isinstance(p["wo"], Quantised) else p["wo"],
        sinks=p.get("sinks"),
    )


@pytree(static=("spec", "heads"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A layer's ``queries`` of any hidden states: ``Heads.project``.

    Attributes:
      spec: static sizes.
      weights: those of the query map; each begins with [N], or is [H].
      heads: where the layer's other heads are.
    """

    spec: ModelSpec
    weights: Params
    heads: AllHeads = HERE

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return queries(self.spec, self.weights, hidden, self.heads)

    def among(self, heads: AllHeads) -> Projection:
        """The same on a device that has the weights of its own heads."""
        return dataclasses.replace(self, heads=heads)


def mlp(spec: ModelSpec, p: Params, x: Float[Array, "B T D"], mesh: Mesh = ONE) -> Float[Array, "B T D"]:
    """D to F and back, gated or not; through the experts of each token where the layer has some."""
    if "router" in p:
        assert spec.experts is not None
        scores = _in_float32(x.reshape(-1, x.shape[-1]), p["router"])
        if spec.linear_bias:
            scores = scores + p["router_bias"].astype(jnp.float32)
        choice = route(spec.experts, scores.reshape(*x.shape[:2], -1))
        return through_experts(spec, p, x, choice, mesh)
    up = product(x, p["w_up"])
    if spec.linear_bias:
        up = up + p["b_up"]
    if spec.mlp == "gelu":
        inner = jax.nn.gelu(up, approximate=True)
    else:
        gate = product(x, p["w_gate"])
        # In float32, rounded once: XLA on CPU turns bfloat16 into float32 and back around every operation.
        inner = gated(spec.mlp, gate.astype(jnp.float32), up.astype(jnp.float32)).astype(x.dtype)
    down = product(inner, p["w_down"])
    return down + p["b_down"] if spec.linear_bias else down


def layer(
    spec: ModelSpec,
    p: Params,
    index: int,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: AttendFn[C],
    carry: C,
    mesh: Mesh = ONE,
) -> tuple[Float[Array, "B T D"], C]:
    """One block: x + attention(norm x), then x + mlp(norm x); ``mesh`` is where experts lie."""
    into = norm(spec, p, "attn_norm", x) if spec.pre_norms else x
    heads = project(spec, p, index, into, positions)
    mixed, carry = attend(index, heads, carry)
    # Flat: contracted over two axes, XLA on CPU transposes all of wo in every decode step.
    flat = mixed.astype(x.dtype).reshape(*mixed.shape[:2], -1)
    y = product(flat, p["wo"].reshape(spec.model_dim, -1))
    if spec.linear_bias:
        y = y + p["bo"]
    x = add(spec, p, x, y, "attn_post_norm")
    into = norm(spec, p, "mlp_norm", x) if spec.pre_norms else x
    return add(spec, p, x, mlp(spec, p, into, mesh), "mlp_post_norm"), carry


def add(
    spec: ModelSpec, p: Params, x: Float[Array, "B T D"], y: Float[Array, "B T D"], post_norm: str
) -> Float[Array, "B T D"]:
    """The residual stream with what a block gives: normalised or scaled where the family does so."""
    if spec.post_norms:
        y = norm(spec, p, post_norm, y)
    if spec.residual_multiplier != 1.0:
        y = y * jnp.asarray(spec.residual_multiplier, y.dtype)
    return x + y


def embed(
    spec: ModelSpec, p: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Token ids to vectors; positions count where they are learned (padding beyond the table is garbage)."""
    table = p["embed"]
    x = rows_of(table, tokens) if isinstance(table, Quantised) else table[tokens]
    if spec.embedding_gain != 1.0:
        x = x * jnp.asarray(spec.embedding_gain, x.dtype)
    return x + p["positions"][positions] if spec.positions == "learned" else x


def logits(spec: ModelSpec, p: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Final norm and output projection; float32."""
    y = norm(spec, p, "final_norm", x)
    head = p["embed" if spec.tied else "head"]
    if isinstance(head, Quantised):
        z = times(y, head)
    else:
        z = _in_float32(y.reshape(-1, y.shape[-1]), head)
    return softcap(z.reshape(*y.shape[:-1], -1) / spec.logits_divisor, spec.final_softcap)


def forward(
    spec: ModelSpec,
    p: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: AttendFn[C],
    carry: C,
) -> tuple[Float[Array, "B T D"], C]:
    """Tokens to the last layer's output, before the final norm.

    Args:
      spec: static sizes; ``spec.at(context)`` where the rope depends on the context (LongRoPE).
      p: params as in the module docstring.
      tokens: ids; padding may hold any id, its outputs are garbage to be ignored.
      positions: absolute position of each token.
      attend: the attention of every layer.
      carry: threaded through every layer's ``attend``.
    """
    x = embed(spec, p, tokens, positions)
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
        s = softcap(s, spec.attn_softcap)
        age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        window = spec.windows[index]
        visible = (age >= 0) if window is None else (age >= 0) & (age < window)
        s = jnp.where(visible, s, -jnp.inf)
        if x.sinks is not None:
            sinks = x.sinks.astype(jnp.float32).reshape(spec.num_kv_heads, spec.groups, 1, 1)
            s = jnp.concatenate([s, jnp.broadcast_to(sinks, (*s.shape[:-1], 1))], axis=-1)
        p = jax.nn.softmax(s, axis=-1)[..., :t].astype(x.v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", p, x.v).reshape(b, t, n, h), carry

    return attend


def dense_logits(spec: ModelSpec, p: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of whole sequences by dense attention; positions 0 .. T-1, the context T."""
    spec = spec.at(tokens.shape[1])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = forward(spec, p, tokens, positions, dense_attend(spec), None)
    return logits(spec, p, x)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions above for one spec: what the decode loop takes as its network.

    Attributes:
      spec: static sizes.
      mesh: where experts lie; what else lies on a mesh needs no word here.
    """

    spec: ModelSpec
    mesh: Mesh = ONE

    @property
    def num_experts(self) -> int | None:
        return self.spec.num_experts

    def on(self, mesh: Mesh) -> Decoder:
        """For weights that lie on a mesh."""
        return self if self.spec.experts is None else dataclasses.replace(self, mesh=mesh)

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.spec.head_dim

    @property
    def max_positions(self) -> int:
        return self.spec.max_positions

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.spec.windows

    def at(self, context: int) -> Decoder:
        return dataclasses.replace(self, spec=self.spec.at(context))

    def of_layer(self, index: int) -> Decoder:
        """See ``kvjax.types.of_layer``."""
        if not self.spec.unturned:
            return self
        unturned = tuple(range(self.num_layers)) if index in self.spec.unturned else ()
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, unturned=unturned))

    @property
    def fingerprint_axes(self) -> dict[str, tuple[int, ...]]:
        return INPUTS_FIRST

    def letters(self, params: Params) -> Params:
        return letters(params)

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        return embed(self.spec, params, tokens, positions)

    def layer(
        self, params: Params, index: int, x: Array, positions: Array, attend: AttendFn[C], carry: C
    ) -> tuple[Array, C]:
        return layer(self.spec, params, index, x, positions, attend, carry, self.mesh)

    def normed(self, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The last layer's output after the final norm."""
        return norm(self.spec, params, "final_norm", x)

    def logits(self, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return logits(self.spec, params, x)
