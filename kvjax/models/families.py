"""The families, a row each: their differences in the mathematics and in config.json.

Everything here is data; ``hf_config`` reads and writes by it, ``hf_table`` holds the names of the tensors.
Defaults are those of transformers' config classes, for keys that a config.json may leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.models.spec import FamilyName

WindowRule = Literal["none", "from_layer", "all_layers", "by_type"]
ExpertRule = Literal["none", "all_layers", "own_width"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Attributes:
      architecture: HF's class.
      traits: fields of ``ModelSpec`` that every member shares; others have the spec's defaults.
      varies: further fields of ``ModelSpec`` that a config.json of the family can set.
      windows: which layers slide: none; those from ``max_window_layers`` on (or by ``layer_types``) if
        ``use_sliding_window``; all, with one window; or by ``layer_types``, else ``sliding_window_pattern``.
      experts: none; in all layers, as wide as ``intermediate_size``; or with keys of their own for width,
        norm of the weights and dense layers.
      needs: keys that must be there beyond the sizes every family has.
      defaults: values of keys that may be absent.
      agrees: values of keys that would ask for other mathematics; an absent key agrees.
      writes: keys of an export that say what the traits are.
      spelled: our name of a key to the family's own.
      thetas: default base of the rope, and of the sliding layers' rope where they have one of their own.
      rope: where a config.json says nothing of it.
      partial: ``partial_rotary_factor`` counts.
    """

    architecture: str
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    varies: tuple[str, ...] = ()
    windows: WindowRule = "none"
    experts: ExpertRule = "none"
    needs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    agrees: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    thetas: tuple[float, ...] = (10_000.0,)
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    partial: bool = False


_NO = (None, False)
_SILU = {"hidden_act": ("silu", "swish")}
_GEMMA = Family(
    architecture="",
    traits={"norm": "rms_plus_one", "post_norms": True, "scaled_embedding": True, "mlp": "geglu"},
    windows="by_type",
    defaults={
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    agrees={
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "attention_bias": _NO,
        "use_bidirectional_attention": _NO,
    },
    writes={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
)

FAMILIES: Mapping[FamilyName, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        agrees={**_SILU, "attention_bias": _NO, "mlp_bias": _NO},
        writes={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        traits={"qkv_bias": True},
        windows="from_layer",
        needs=("num_key_value_heads",),
        defaults={"sliding_window": 4096},
        agrees={**_SILU, "use_mrope": _NO},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        traits={"qk_norm": True},
        windows="from_layer",
        needs=("num_key_value_heads",),
        defaults={"head_dim": 128, "sliding_window": 4096},
        agrees={**_SILU, "attention_bias": _NO},
        writes={"attention_bias": False},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        windows="all_layers",
        needs=("num_key_value_heads",),
        defaults={"sliding_window": 4096},
        agrees={**_SILU, "attention_bias": _NO},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        traits={"qk_norm": True},
        varies=("experts",),
        experts="own_width",
        needs=("num_key_value_heads",),
        defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
        agrees={**_SILU, "attention_bias": _NO, "use_sliding_window": _NO},
        writes={"attention_bias": False, "use_sliding_window": False},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        varies=("experts",),
        windows="all_layers",
        experts="all_layers",
        needs=("num_key_value_heads",),
        defaults={"num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "sliding_window": None},
        agrees=_SILU,
        thetas=(1_000_000.0,),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        traits={"mlp": "swiglu_clipped", "qkv_bias": True, "linear_bias": True, "sinks": True},
        varies=("experts",),
        windows="by_type",
        experts="all_layers",
        needs=("num_key_value_heads",),
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
        },
        agrees={**_SILU, "attention_bias": (None, True), "swiglu_limit": (None, 7.0)},
        writes={"attention_bias": True},
        thetas=(150_000.0,),
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        windows="all_layers",
        defaults={"rms_norm_eps": 1e-5},
        agrees={**_SILU, "attention_bias": _NO, "lm_head_bias": _NO, "mlp_bias": _NO},
        writes={"pad_token_id": None},  # left out, it is 32000, and transformers refuses smaller vocabularies
        partial=True,
    ),
    "gemma2": dataclasses.replace(
        _GEMMA,
        architecture="Gemma2ForCausalLM",
        varies=("query_pre_attn_scalar", "attn_softcap", "final_softcap"),
        needs=("num_key_value_heads",),
        defaults={
            **_GEMMA.defaults,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": dataclasses.replace(
        _GEMMA,
        architecture="Gemma3ForCausalLM",
        traits={**_GEMMA.traits, "qk_norm": True},
        varies=("query_pre_attn_scalar", "final_softcap", "local_rope"),
        defaults={
            **_GEMMA.defaults,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
        agrees={**_GEMMA.agrees, "attn_logit_softcapping": (None,)},
        thetas=(1_000_000.0, 10_000.0),
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        varies=("unturned",),
        defaults={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        agrees={**_SILU, "attention_bias": _NO, "mlp_bias": _NO, "use_sliding_window": _NO},
        writes={"attention_bias": False, "mlp_bias": False, "pad_token_id": None},  # as of phi3
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        varies=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_divisor"),
        defaults={
            **dict.fromkeys(("attention_multiplier", "embedding_multiplier"), 1.0),
            **dict.fromkeys(("residual_multiplier", "logits_scaling"), 1.0),
        },
        agrees={**_SILU, "attention_bias": _NO, "mlp_bias": _NO},
        writes={"attention_bias": False, "mlp_bias": False},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        traits={"joint_qk_norm": True, "pre_norms": False, "post_norms": True},
        defaults={"rms_norm_eps": 1e-5},
        agrees={**_SILU, "attention_bias": _NO},
        writes={"attention_bias": False},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        traits={
            "positions": "learned",
            "norm": "layer",
            "mlp": "gelu",
            "qkv_bias": True,
            "linear_bias": True,
        },
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        agrees={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": _NO,
            "add_cross_attention": _NO,
        },
        writes={"activation_function": "gelu_new"},
        spelled={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
}

_SHARED = "its later layers read the keys and values of earlier ones, and kvjax holds a cache for each layer"
_LINEAR = "its linear-attention layers hold a state, not keys and values, which no policy here compresses"
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _SHARED),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "minimax", "kimi_linear"), _LINEAR),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "bamba", "zamba2", "falcon_h1", "nemotron_h"), _LINEAR),
    **dict.fromkeys(("granitemoehybrid", "lfm2", "recurrent_gemma", "olmo_hybrid"), _LINEAR),
}
"""Why families are refused whose name alone says so."""
