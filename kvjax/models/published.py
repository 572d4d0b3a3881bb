"""Sizes of well-known models by name, as in their config.json: to plan without a download."""

from __future__ import annotations

from typing import Any

from kvjax.models.hf_config import read_config
from kvjax.models.hf_values import ModelError
from kvjax.models.spec import ModelSpec

_LLAMA_31: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

_QWEN_25: dict[str, Any] = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
}


def _llama_31(*, hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp}
    return _LLAMA_31 | sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama_31(hidden=4096, mlp=14336, layers=32, heads=32),
    "llama-3.1-70b": _llama_31(hidden=8192, mlp=28672, layers=80, heads=64),
    "qwen2.5-7b": _QWEN_25
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": _QWEN_25
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": _llama_31(hidden=2048, mlp=8192, layers=16, heads=32)
    | {
        "head_dim": 64,
        "rope_scaling": _LLAMA_31["rope_scaling"] | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
}
"""The config.json of each name; all are stored in bfloat16."""


def spec(name: str) -> ModelSpec:
    """The sizes that a name stands for.

    Raises:
      ModelError: no such name.
    """
    if name not in CONFIGS:
        raise ModelError(f"{name!r} is no model known by name. Give one of {', '.join(CONFIGS)}.")
    return read_config(CONFIGS[name], {}, name)
