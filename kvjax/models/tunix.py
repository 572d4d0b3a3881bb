"""Models of google-tunix (Flax NNX): Llama 3, Qwen2, Qwen3 and Gemma 3, read as our decoder's weights.

Tried with google-tunix 0.1.7. Nothing of it is imported: a model is known by its class, its config and the
names of its parameters. Embeddings and norms are shared. Weight matrices are copied: theirs have the inputs
first, ours last (``kvjax.models.layout``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from kvjax.models import decoder
from kvjax.models.hf_config import ModelError
from kvjax.models.layout import inputs_last
from kvjax.models.spec import LinearScaling, ModelSpec, Rope
from kvjax.types import Params

Leaf = tuple[str, Callable[[Any, ModelSpec], Any] | None]
"""The name of their parameter, and a function that lays it inputs first; None where it lies so."""


def _heads(x: Any, spec: ModelSpec) -> Any:
    """A bias [N H] as [N, H]."""
    return x.reshape(-1, spec.head_dim)


def _middle(x: Any, spec: ModelSpec) -> Any:
    """Queries [N, D, H] as [D, N, H]."""
    del spec
    return jnp.swapaxes(x, 0, 1)


def _stacked(at: int) -> Callable[[Any, ModelSpec], Any]:
    """One of several maps [C, K, D, H] as [D, K, H]."""
    return lambda x, spec: _middle(x[at], spec)


_EINSUM: dict[str, Leaf] = {
    "attn_norm": ("input_layernorm.w", None),
    "wq": ("attn.q_proj.w", None),
    "wk": ("attn.k_proj.w", None),
    "wv": ("attn.v_proj.w", None),
    "wo": ("attn.o_proj.w", None),
    "mlp_norm": ("post_attention_layernorm.w", None),
    "w_gate": ("mlp.gate_proj.kernel", None),
    "w_up": ("mlp.up_proj.kernel", None),
    "w_down": ("mlp.down_proj.kernel", None),
}
_GEMMA: dict[str, Leaf] = {
    "attn_norm": ("pre_attention_norm.scale", None),
    "wq": ("attn.q_einsum.w", _middle),
    "wk": ("attn.kv_einsum.w", _stacked(0)),
    "wv": ("attn.kv_einsum.w", _stacked(1)),
    "wo": ("attn.attn_vec_einsum.w", None),
    "q_norm": ("attn._query_norm.scale", None),
    "k_norm": ("attn._key_norm.scale", None),
    "attn_post_norm": ("post_attention_norm.scale", None),
    "mlp_norm": ("pre_ffw_norm.scale", None),
    "w_gate": ("mlp.gate_proj.kernel", None),
    "w_up": ("mlp.up_proj.kernel", None),
    "w_down": ("mlp.down_proj.kernel", None),
    "mlp_post_norm": ("post_ffw_norm.scale", None),
}
_AS_MANY = {f"w{name}": ("attn.qkv_einsum.w", _stacked(at)) for at, name in enumerate("qkv")}
"""Where a Gemma has as many KV heads as query heads, the three maps are stacked."""

_OUTER: dict[str, Leaf] = {"embed": ("embedder.input_embedding", None), "head": ("lm_head.w", None)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a class of theirs is here.

    Attributes:
      traits: fields of ``ModelSpec`` that its config does not say.
      layer: our leaf of a layer to theirs.
      norm: their name of a norm's weight.
      max_positions: that models of the family were trained for, which no config of theirs says.
    """

    traits: Mapping[str, Any]
    layer: Mapping[str, Leaf]
    norm: str
    max_positions: int


KINDS = {
    "Llama3": Kind({"family": "llama"}, _EINSUM, "w", 131_072),
    "Qwen2": Kind(
        {"family": "qwen2", "qkv_bias": True},
        _EINSUM | {f"b{name}": (f"attn.{name}_bias", _heads) for name in "qkv"},
        "w",
        32_768,
    ),
    "Qwen3": Kind(
        {"family": "qwen3", "qk_norm": True},
        _EINSUM | {f"{name}_norm": (f"attn.{name}_norm.w", None) for name in "qk"},
        "w",
        40_960,
    ),
    "Gemma3": Kind(
        {
            "family": "gemma3_text",
            "norm": "rms_plus_one",
            "qk_norm": True,
            "post_norms": True,
            "scaled_embedding": True,
            "mlp": "geglu",
        },
        _GEMMA,
        "scale",
        32_768,
    ),
}


def is_tunix(model: Any) -> bool:
    """Is it an object of google-tunix?"""
    return type(model).__module__.startswith("tunix.")


def read(model: Any) -> tuple[ModelSpec, Params, set[int]]:
    """The sizes and weights of a tunix model.

    Returns:
      The spec; the params tree of ``kvjax.models.decoder``; ``id`` of its arrays that are the model's own.

    Raises:
      ModelError: another family, or experts.
    """
    name = type(model).__name__
    kind, config = KINDS.get(name), getattr(model, "config", None)
    if kind is None or config is None:
        raise ModelError(
            f"load({name}(...)) is not a tunix model that kvjax reads ({', '.join(KINDS)}). Save it in "
            "Hugging Face's format and load that folder."
        )
    if getattr(config, "num_experts", None):
        raise ModelError(f"load({name}(...)) has {config.num_experts} experts. Give a model without experts.")
    spec = _spec(model, kind)
    shared: set[int] = set()

    def take(owner: Any, name: str, leaf: Leaf) -> Any:
        path, layout = leaf
        for part in path.split("."):
            owner = getattr(owner, part)
        array = owner.get_value() if hasattr(type(owner), "get_value") else owner.value
        laid = array if layout is None else layout(array, spec)
        laid = inputs_last({name: laid})[name]
        if laid is array:
            shared.add(id(array))
        return laid

    tree = decoder.shapes(spec)
    params: Params = {name: take(model, name, _OUTER[name]) for name in tree if name in _OUTER}
    params["final_norm"] = take(model, "final_norm", (f"final_norm.{kind.norm}", None))
    as_many = kind.layer is _GEMMA and spec.num_heads == spec.num_kv_heads
    table = {**kind.layer, **(_AS_MANY if as_many else {})}
    params["layers"] = [
        {name: take(layer, name, table[name]) for name in names}
        for layer, names in zip(model.layers, tree["layers"])
    ]
    return spec, params, shared


def _spec(model: Any, kind: Kind) -> ModelSpec:
    c, traits = model.config, dict(kind.traits)
    sizes = {
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "model_dim": c.embed_dim,
        "mlp_dim": c.hidden_dim,
        "max_positions": kind.max_positions,
    }
    if kind.layer is not _GEMMA:
        tied = c.weight_tying if hasattr(c, "weight_tying") else c.use_tied_embedding
        ruled = {
            "vocab_size": c.vocab_size,
            "norm_eps": c.norm_eps,
            "tied": tied,
            "rope": Rope(theta=theta(model)),
        }
        return ModelSpec(**sizes, **ruled, **traits)

    def rope(base: float, factor: float) -> Rope:
        return Rope(theta=float(base), scaling=None if factor == 1 else LinearScaling(factor=float(factor)))

    slides = [layer.attn.attn_type.name == "LOCAL_SLIDING" for layer in model.layers]
    by_width = c.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
    if c.global_scale_factor != 1:  # the sizes that were trained for longer texts
        sizes["max_positions"] = 131_072
    return ModelSpec(
        **sizes,
        **traits,
        vocab_size=c.num_embed,
        windows=tuple(c.sliding_window_size if slide else None for slide in slides),
        rope=rope(c.global_base_frequency, c.global_scale_factor),
        local_rope=rope(c.local_base_frequency, c.local_scale_factor),
        query_pre_attn_scalar=c.embed_dim // c.num_heads if by_width else None,
    )


def theta(model: Any) -> float:
    """The base by which the model really turns.

    Attention of 0.1.7's Llama3 and Qwen3 calls ``apply_rope`` without the config's ``rope_theta``, so that
    its default counts. Whether it does is read off the names in the compiled function.
    """
    attention = type(model.layers[0].attn)
    said = float(model.config.rope_theta)
    code = attention.block.__code__
    words = {word for const in code.co_consts for word in (const if isinstance(const, tuple) else (const,))}
    turn = attention.block.__globals__.get("apply_rope")
    if turn is None or "rope_theta" in words | set(code.co_names):
        return said
    return float(turn.__defaults__[-1])
