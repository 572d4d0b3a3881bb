"""The metadata of a GGUF file as the config.json that ``hf_config`` reads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kvjax.models.gguf_file import Header, factors
from kvjax.models.hf_values import ModelError, count
from kvjax.models.hf_windows import FULL, SLIDING
from kvjax.models.rope import Llama3Scaling, Rope

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""What llama.cpp calls the architectures that are read, and the family of each."""

_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NEEDED = list(_KEYS.values())[:6]
_SOFTCAPS = list(_KEYS.values())[-2:]
_NUMBERS = (
    *("attention.value_length", "attention.sliding_window", "rope.dimension_count", "rope.scale_linear"),
    *("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length"),
)
"""Further keys that hold one number."""

# Keys that would ask for other mathematics unless they say this.
_AGREES = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
}

# The layers of the 27B models, which alone divide scores by sqrt(D / N) instead of sqrt(H); no key says so.
_OTHER_SCALE = {"gemma2": 46, "gemma3": 62}

_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
"""Tokens that end a turn, where no key names them."""


def read_config(header: Header) -> dict[str, Any]:
    """A config.json that says what a GGUF file's metadata and rope factors say.

    Raises:
      ModelError: another architecture, experts, missing sizes, or mathematics that kvjax does not do.
    """
    meta, file = header.metadata, str(header.path)
    arch = meta.get("general.architecture")
    if experts := meta.get(f"{arch}.expert_count"):
        raise ModelError(
            f"{file} has {arch}.expert_count {experts!r}, and kvjax reads no experts from GGUF files. Give "
            "the model as a folder in Hugging Face's format; --weight-dtype int4 holds it in 4 bits."
        )
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(
            f"{file} has the architecture {arch!r}; of GGUF files kvjax reads {', '.join(ARCHITECTURES)}. "
            "Choose a model of one of these."
        )
    own = {key.removeprefix(f"{arch}."): value for key, value in meta.items() if key.startswith(f"{arch}.")}
    missing = [f"{arch}.{key}" for key in _NEEDED if key not in own]
    if "token_embd.weight" not in header.tensors:
        missing.append("token_embd.weight")
    if missing:
        raise ModelError(f"{file} lacks {', '.join(missing)}. Download it again.")
    read = {*_KEYS.values(), *_AGREES, *_NUMBERS}
    if lists := [f"{arch}.{key}" for key in own if key in read and not isinstance(own[key], int | float)]:
        raise ModelError(
            f"{file} does not have one number as {', '.join(lists)}; all layers of kvjax's models are "
            "of the same sizes. Choose a plain model of this architecture."
        )
    config = {key: own[name] for key, name in _KEYS.items() if name in own}
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        count(config, key, file)
    width = config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = head_dim = count(config, "head_dim", file, width)
    agrees = _AGREES if arch.startswith("gemma") else {**_AGREES, **dict.fromkeys(_SOFTCAPS, 0)}
    asks = [f"{key}={own[key]!r}" for key, value in agrees.items() if own.get(key, value) != value]
    if own.get("attention.value_length", width) != head_dim:
        asks.append("values of another length than keys")
    if asks:
        raise ModelError(
            f"{file} asks for {', '.join(asks)}, which kvjax's {arch} decoder does not compute; ignoring it "
            "would change the model's outputs. Choose a plain model of this architecture."
        )
    layers = {m[1] for name in header.tensors if (m := re.match(r"blk\.(\d+)\.", name))}
    if config["num_hidden_layers"] != len(layers):
        raise ModelError(
            f"{file} has {arch}.block_count {config['num_hidden_layers']!r} and the tensors of {len(layers)} "
            "layers. Download it again."
        )
    config["model_type"] = ARCHITECTURES[arch]
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["dtype"] = "bfloat16"
    config["bos_token_id"] = meta.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _ends(meta)
    if arch in _OTHER_SCALE:
        wide = config["num_hidden_layers"] == _OTHER_SCALE[arch]
        config["query_pre_attn_scalar"] = width if wide else head_dim
    return config | _rope(header, own, config) | _windows(arch, own, config, file)


def _ends(meta: dict[str, Any]) -> list[int]:
    """Ids that end a text or a turn, each once."""
    named = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = meta.get("tokenizer.ggml.tokens")
    ends = [i for i, token in enumerate(tokens) if token in _ENDS] if isinstance(tokens, list) else []
    return list(dict.fromkeys([*(i for i in named if isinstance(i, int)), *ends]))


def _rope(header: Header, own: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the rope; factors for each frequency lie in tensors."""
    head_dim, longest = config["head_dim"], config["max_position_embeddings"]
    fraction = own.get("rope.dimension_count", head_dim) / head_dim
    keys = {} if fraction == 1 else {"partial_rotary_factor": fraction}
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1))
    original = own.get("rope.scaling.original_context_length", longest)
    kind = own.get("rope.scaling.type", "linear" if factor != 1 else "none")
    short, long = (factors(header, f"rope_factors_{which}.weight") for which in ("short", "long"))
    same = factors(header, "rope_freqs.weight")
    if short and long:
        gain = own.get("rope.scaling.attn_factor")
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        scaling |= {} if gain is None else {"attention_factor": gain}
        keys["original_max_position_embeddings"] = original
    elif same:
        scaling = _llama3(same, config) or {
            "rope_type": "longrope",
            "short_factor": same,
            "long_factor": same,
            "attention_factor": 1.0,
        }
    elif kind == "none":
        return keys
    else:
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {**keys, "rope_scaling": scaling}


def _llama3(factors_read: list[float], config: dict[str, Any]) -> dict[str, Any] | None:
    """The rule of Llama 3.1 to 3.3 if it gives these factors."""
    theta, head_dim = config.get("rope_theta", 10_000.0), config["head_dim"]
    if len(factors_read) != head_dim // 2 or min(factors_read) <= 0:
        return None
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = Llama3Scaling(factor=max(factors_read), **rule)  # type: ignore[arg-type]
    plain = Rope(theta=theta).frequencies(head_dim)
    ours = plain / Rope(theta=theta, scaling=scaling).frequencies(head_dim)
    is_llama3 = np.allclose(factors_read, ours, rtol=1e-4)
    return {"rope_type": "llama3", "factor": max(factors_read), **rule} if is_llama3 else None


def _windows(arch: str, own: dict[str, Any], config: dict[str, Any], file: str) -> dict[str, Any]:
    """The keys of the sliding windows."""
    window, pattern = own.get("attention.sliding_window"), own.get("attention.sliding_window_pattern")
    slides = bool(window) and window < config["max_position_embeddings"]
    if arch == "phi3":
        return {"sliding_window": window or None}
    if arch == "llama":  # Mistral's own name for a llama whose layers all slide
        return {"model_type": "mistral", "sliding_window": window} if slides else {}
    if arch in ("qwen2", "qwen3"):
        if slides:
            raise ModelError(
                f"{file} has a sliding window of {window} and does not say for which layers. Give the model "
                "as a folder in Hugging Face's format."
            )
        return {}
    keys = {} if window is None else {"sliding_window": window or None}
    if isinstance(pattern, np.ndarray):
        return {**keys, "layer_types": [SLIDING if slid else FULL for slid in pattern]}
    return keys if pattern is None else {**keys, "sliding_window_pattern": pattern}
