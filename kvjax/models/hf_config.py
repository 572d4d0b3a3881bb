"""config.json to ``ModelSpec`` and back, by the rows of ``families``.

Every key that would change the mathematics is either read into the spec or refused; keys that
only matter to training or to a runtime (dropout, initializer_range, use_cache ...) are ignored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.models.families import FAMILIES, OTHERS, Family
from kvjax.models.hf_experts import odd_experts, read_experts, write_experts
from kvjax.models.hf_fp8 import Blocks, read_quantisation
from kvjax.models.hf_rope import read_ropes, write_ropes
from kvjax.models.hf_values import ModelError, count, number
from kvjax.models.hf_windows import SLIDING, read_windows, write_windows
from kvjax.models.mxfp4 import is_mxfp4
from kvjax.models.rope import Rope
from kvjax.models.spec import ModelSpec
from kvjax.types import DTYPES

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields of the spec that every family reads; the others are traits, or listed in ``Family.varies``.
_COMMON = {
    *("family", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "model_dim", "mlp_dim"),
    *("max_positions", "rope", "norm_eps", "tied", "windows", "bos", "eos"),
}


def read_config(config: dict[str, Any], generation: dict[str, Any], file: str) -> ModelSpec:
    """The spec a config.json describes.

    Args:
      config: config.json as parsed; of a gemma3 with vision, its ``text_config`` is read.
      generation: generation_config.json as parsed, or {}; its bos and eos ids win.
      file: path of config.json, for messages.

    Raises:
      ModelError: another family, missing or impossible sizes, or mathematics kvjax does not do.
    """
    config = _text_part(config)
    name = next((name for name in FAMILIES if name == config.get("model_type")), None)
    reason = OTHERS.get(str(config.get("model_type")))
    if reason is not None:
        raise ModelError(
            f"{file} has model_type {config['model_type']!r}: {reason}. Choose one of {', '.join(FAMILIES)}."
        )
    if name is None:
        raise ModelError(
            f"{file} has model_type {config.get('model_type')!r}; kvjax reads {', '.join(FAMILIES)}. "
            "Choose a model of one of these families."
        )
    family = FAMILIES[name]
    config = _respelled(config, family)
    read_quantisation(config, file)
    _check_agrees(config, family, file)
    needed = [*_SIZES, "max_position_embeddings", *family.needs]
    missing = [family.spelled.get(key, key) for key in needed if key not in config]
    if missing:
        raise ModelError(f"{file} lacks {', '.join(missing)}; add what the model was trained with.")
    vocab, model_dim, mlp_dim, layers, heads = (count(config, key, file) for key in _SIZES)
    learned = family.traits.get("positions") == "learned"
    kv_heads, head_dim = _heads(config, model_dim, heads, learned, file)
    rope, local_rope = read_ropes(config, family, head_dim, file)
    return ModelSpec(
        family=name,
        vocab_size=vocab,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        model_dim=model_dim,
        mlp_dim=mlp_dim,
        max_positions=count(config, "max_position_embeddings", file),
        rope=rope,
        local_rope=local_rope,
        norm_eps=number(config, "rms_norm_eps", file, 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=read_windows(config, family, layers, file),
        bos=_ids(generation, config, "bos_token_id", file)[0],
        eos=tuple(i for i in _ids(generation, config, "eos_token_id", file) if i is not None),
        **family.traits,
        **_read_scores(config, family, file),
        **_read_unturned(config, family, layers, file),
        experts=read_experts(config, family, layers, file),
    )


def write_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """A config.json that transformers 4 (from 4.53 for sliding windows) and 5 read as this spec.

    Raises:
      ModelError: the family in HF format has no way to say what the spec says.
    """
    family = FAMILIES[spec.family]
    _check_exportable(spec, family)
    config: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.model_dim,
        "intermediate_size": spec.mlp_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
    }
    if spec.mlp in ("swiglu", "swiglu_clipped"):
        config["hidden_act"] = "silu"
    if family.spelled:
        config = {family.spelled.get(k, k): v for k, v in config.items() if k in (*family.spelled, *_SIZES)}
    return {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **config,
        "tie_word_embeddings": spec.tied,
        **write_ropes(spec),
        **write_windows(spec, family),
        **_write_scores(spec, family),
        **_write_unturned(spec, family),
        **write_experts(spec, family),
        **family.writes,
        "bos_token_id": spec.bos,
        "eos_token_id": eos_value(spec.eos),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def stated_blocks(config: dict[str, Any], file: str) -> Blocks | None:
    """How FP8 tensors are scaled; None where the checkpoint is not quantised."""
    config = _text_part(config)
    about = config.get("quantization_config")
    if config.get("model_type") == "gpt_oss" and is_mxfp4(about):  # its experts are dequantised on their way
        return None
    return read_quantisation(config, file)


def eos_value(eos: tuple[int, ...]) -> int | list[int] | None:
    """Ids that end a text as HF files spell them: null, one number, or a list."""
    return (list(eos) if len(eos) > 1 else eos[0]) if eos else None


def stated_dtype(config: dict[str, Any], file: str) -> str | None:
    """The dtype config.json names (``dtype``, before ``torch_dtype``), or None."""
    config = {**_text_part(config), **config}
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is not None and stated not in DTYPES:
        raise ModelError(
            f"{file} names dtype {stated!r}; kvjax holds weights as {', '.join(DTYPES)}. Pass one as dtype=."
        )
    return stated


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The text model of a gemma3 that also sees; any other config as it is."""
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, dict):
        return config
    outer = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    return {**{key: config[key] for key in outer if key in config}, **text, "model_type": "gemma3_text"}


def _respelled(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The family's own keys under our names, and what may be left out put in."""
    ours = {own: key for key, own in family.spelled.items()}
    config = {ours.get(key, key): value for key, value in config.items()}
    if family.spelled and config.get("intermediate_size") is None and "hidden_size" in config:
        config["intermediate_size"] = 4 * config["hidden_size"]  # gpt2's n_inner is mostly null
    if config.get("model_type") == "gpt_oss" and is_mxfp4(config.get("quantization_config")):
        del config["quantization_config"]  # its experts are dequantised where they are read
    return {**family.defaults, **config}


def _check_agrees(config: dict[str, Any], family: Family, file: str) -> None:
    agrees = dict(family.agrees)
    if not family.partial:
        agrees["partial_rotary_factor"] = (None, 1)
    asks = [f"{k}={config[k]!r}" for k, allowed in agrees.items() if k in config and config[k] not in allowed]
    if family.windows == "none" and SLIDING in (config.get("layer_types") or ()):
        asks.append(f"layer_types with {SLIDING!r}")
    if asks:
        raise ModelError(
            f"{file} asks for {', '.join(asks)}, which kvjax's {config['model_type']} decoder does not "
            "compute; ignoring it would change the model's outputs. Choose a plain checkpoint of the family."
        )


def _check_exportable(spec: ModelSpec, family: Family) -> None:
    default = {field.name: field.default for field in dataclasses.fields(ModelSpec)} | dict(family.traits)
    odd = [
        f"{name}={getattr(spec, name)!r}"
        for name, value in default.items()
        if name not in _COMMON and name not in family.varies and getattr(spec, name) != value
    ]
    if spec.positions == "learned" and spec.rope != Rope():
        odd.append(f"rope={spec.rope!r}")
    if family.spelled and (spec.num_kv_heads, spec.head_dim) != (
        spec.num_heads,
        spec.model_dim // spec.num_heads,
    ):
        odd.append(f"num_kv_heads={spec.num_kv_heads}, head_dim={spec.head_dim}")
    odd += odd_experts(spec, family)
    if "local_rope" in family.varies and spec.local_rope is None:
        odd.append("local_rope=None")
    sizes = set(spec.windows)
    mixed = len(sizes) > 1 and family.windows == "all_layers"
    if mixed or len(sizes - {None}) > (family.windows != "none"):
        odd.append(f"windows={spec.windows}")
    if odd:
        raise ModelError(
            f"save() cannot write family={spec.family!r} with {', '.join(odd)}: its HF format has no way to "
            "say so. Choose the family that has these (models.families lists them)."
        )


def _heads(config: dict[str, Any], model_dim: int, heads: int, learned: bool, file: str) -> tuple[int, int]:
    if config.get("head_dim") is None and model_dim % heads:
        raise ModelError(
            f"{file} has no head_dim and hidden_size {model_dim} is not a multiple of {heads} heads."
        )
    head_dim = count(config, "head_dim", file, model_dim // heads)
    kv_heads = count(config, "num_key_value_heads", file, heads)
    if heads % kv_heads or (head_dim % 2 and not learned):
        raise ModelError(
            f"{file} has {heads} query heads, {kv_heads} KV heads and head_dim {head_dim}; query heads must "
            "be a multiple of KV heads, and head_dim even where a rope turns it. Correct the sizes."
        )
    return kv_heads, head_dim


_SCORES = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "attention_multiplier": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


def _read_scores(config: dict[str, Any], family: Family, file: str) -> dict[str, Any]:
    keys = {field: key for field, key in _SCORES.items() if field in family.varies}
    return {f: None if config.get(key) is None else number(config, key, file) for f, key in keys.items()}


def _write_scores(spec: ModelSpec, family: Family) -> dict[str, float | None]:
    written = {key: getattr(spec, field) for field, key in _SCORES.items() if field in family.varies}
    scalar = written.get("query_pre_attn_scalar", 0.0)
    if scalar is None or (scalar and scalar == int(scalar)):  # a whole number to transformers, mostly
        written["query_pre_attn_scalar"] = int(spec.head_dim if scalar is None else scalar)
    return written


def _read_unturned(config: dict[str, Any], family: Family, layers: int, file: str) -> dict[str, Any]:
    """Layers without RoPE: a list that has 0 for each, or every so many."""
    if "unturned" not in family.varies:
        return {}
    turns = config.get("no_rope_layers")
    if turns is None:
        interval = count(config, "no_rope_layer_interval", file)
        turns = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(turns, list) or len(turns) != layers or not set(turns) <= {0, 1}:
        raise ModelError(f"{file} has no_rope_layers {turns!r}; it holds 1 or 0 for each of {layers} layers.")
    return {"unturned": tuple(layer for layer, turn in enumerate(turns) if not turn)}


def _write_unturned(spec: ModelSpec, family: Family) -> dict[str, Any]:
    if "unturned" not in family.varies:
        return {}
    turns = [int(layer not in spec.unturned) for layer in range(spec.num_layers)]
    full = {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * spec.num_layers,
    }
    return {"no_rope_layers": turns, "no_rope_layer_interval": 4, **full}


def _ids(generation: dict[str, Any], config: dict[str, Any], key: str, file: str) -> list[int | None]:
    value = config.get(key) if generation.get(key) is None else generation[key]
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if not all(i is None or (isinstance(i, int) and not isinstance(i, bool) and i >= 0) for i in ids):
        raise ModelError(
            f"{file} or generation_config.json has {key} {value!r}; ids are whole numbers from 0."
        )
    return ids
