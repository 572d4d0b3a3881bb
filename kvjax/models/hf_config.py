"""config.json to ``ModelSpec`` and back, for ``model_type`` "llama" and "qwen2".

Every key that would change the mathematics is either read into the spec or refused; keys that
only matter to training or to a runtime (dropout, initializer_range, use_cache ...) are ignored.
The rope is understood in both spellings: ``rope_theta`` + ``rope_scaling`` at the top level
(transformers 4) and the dict ``rope_parameters`` (transformers 5); both are written.
"""

from __future__ import annotations

import math
from typing import Any

from kvjax.models.spec import Llama3Scaling, ModelSpec, Rope

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes weights may be stored in and cast to."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# What the decoder computes, as values of keys that could ask for something else. An absent key agrees.
_AGREES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
}
_AGREES_TOO: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"attention_bias": (None, False), "mlp_bias": (None, False)},
    "qwen2": {"use_mrope": (None, False)},
}


class ModelError(ValueError):
    """A folder, file or tree of weights that is not a model kvjax can read or write."""


def read_config(config: dict[str, Any], generation: dict[str, Any], file: str) -> ModelSpec:
    """The spec a config.json describes.

    Args:
      config: config.json as parsed.
      generation: generation_config.json as parsed, or {}; its bos and eos ids win.
      file: path of config.json, for messages.

    Raises:
      ModelError: another family, missing or impossible sizes, or mathematics kvjax does not do.
    """
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelError(
            f"{file} has model_type {family!r}; kvjax reads {' and '.join(_ARCHITECTURES)}. "
            "Choose a model of one of these families."
        )
    _check_agrees(config, {**_AGREES, **_AGREES_TOO[family]}, file)
    needed = [*_SIZES, "max_position_embeddings", *(["num_key_value_heads"] if family == "qwen2" else [])]
    missing = [key for key in needed if key not in config]
    if missing:
        raise ModelError(f"{file} lacks {', '.join(missing)}; add what the model was trained with.")
    vocab, model_dim, mlp_dim, layers, heads = (_count(config, key, file) for key in _SIZES)
    if config.get("head_dim") is None and model_dim % heads:
        raise ModelError(
            f"{file} has no head_dim and hidden_size {model_dim} is no multiple of {heads} heads."
        )
    head_dim = _count(config, "head_dim", file, model_dim // heads)
    kv_heads = _count(config, "num_key_value_heads", file, heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{file} has {heads} query heads, {kv_heads} KV heads and head_dim {head_dim}; query heads must "
            "be a multiple of KV heads and head_dim even. Correct the sizes."
        )
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        model_dim=model_dim,
        mlp_dim=mlp_dim,
        max_positions=_count(config, "max_position_embeddings", file),
        rope=_read_rope(config, file),
        norm_eps=_number(config, "rms_norm_eps", file, 1e-6),
        qkv_bias=family == "qwen2",
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=_read_windows(config, layers, file),
        bos=_ids(generation, config, "bos_token_id", file)[0],
        eos=tuple(i for i in _ids(generation, config, "eos_token_id", file) if i is not None),
    )


def write_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """A config.json that transformers 4 (from 4.53 for sliding windows) and 5 read as this spec.

    Raises:
      ModelError: the family in HF format has no way to say what the spec says.
    """
    _check_exportable(spec)
    rope = _write_rope(spec.rope)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.model_dim,
        "intermediate_size": spec.mlp_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.rope.theta,
        "rope_scaling": rope if spec.rope.scaling else None,
        "rope_parameters": {**rope, "rope_theta": spec.rope.theta},
        "bos_token_id": spec.bos,
        "eos_token_id": eos_value(spec.eos),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if spec.family == "llama":
        return config | {"attention_bias": False, "mlp_bias": False}
    sliding = [index for index, window in enumerate(spec.windows) if window is not None]
    return config | {
        "use_sliding_window": bool(sliding),
        "sliding_window": spec.windows[sliding[0]] if sliding else None,
        "max_window_layers": sliding[0] if sliding else spec.num_layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in spec.windows],
    }


def eos_value(eos: tuple[int, ...]) -> int | list[int] | None:
    """Ids that end a text as HF files spell them: null, one number, or a list."""
    return (list(eos) if len(eos) > 1 else eos[0]) if eos else None


def stated_dtype(config: dict[str, Any], file: str) -> str | None:
    """The dtype config.json names (``dtype``, before ``torch_dtype``), or None."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is not None and stated not in DTYPES:
        raise ModelError(
            f"{file} names dtype {stated!r}; kvjax holds weights as {', '.join(DTYPES)}. Pass one as dtype=."
        )
    return stated


def _check_agrees(config: dict[str, Any], agrees: dict[str, tuple[Any, ...]], file: str) -> None:
    asks = [f"{k}={config[k]!r}" for k, allowed in agrees.items() if k in config and config[k] not in allowed]
    if config.get("model_type") == "llama" and "sliding_attention" in (config.get("layer_types") or ()):
        asks.append("layer_types with 'sliding_attention'")
    if asks:
        raise ModelError(
            f"{file} asks for {', '.join(asks)}, which kvjax's {config['model_type']} decoder does not "
            "compute; ignoring it would change the model's outputs. Choose a plain checkpoint of the family."
        )


def _check_exportable(spec: ModelSpec) -> None:
    if spec.qkv_bias != (spec.family == "qwen2"):
        raise ModelError(
            f"save() cannot write family={spec.family!r} with qkv_bias={spec.qkv_bias}: in HF format qwen2 "
            "has these biases and llama has none. Set family='qwen2' for a model with biases, else 'llama'."
        )
    sizes = {window for window in spec.windows if window is not None}
    if len(sizes) > (1 if spec.family == "qwen2" else 0):
        raise ModelError(
            f"save() cannot write family={spec.family!r} with windows={spec.windows}: in HF format qwen2 "
            "holds one window size and llama none. Use qwen2 with a single size."
        )


def _read_rope(config: dict[str, Any], file: str) -> Rope:
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    spellings = [config.get("rope_parameters"), config.get("rope_scaling")]
    for spelling in spellings:
        flat = not spelling or isinstance(spelling, dict)
        if not flat or any(isinstance(value, dict) for value in (spelling or {}).values()):
            raise ModelError(
                f"{file} has a rope that is no flat dict, and kvjax computes one rope for all layers. "
                "Choose a checkpoint with a single rope."
            )
    ropes = [_one_rope({**theta, **spelling}, config, file) for spelling in spellings if spelling]
    ropes = ropes or [_one_rope(theta, config, file)]
    thetas = {rope.theta for rope in ropes} | {float(value) for value in theta.values()}
    if len(set(ropes)) > 1 or len(thetas) > 1:
        raise ModelError(
            f"{file} spells its rope twice and differently (rope_theta / rope_scaling and rope_parameters). "
            "Keep the one the model was trained with."
        )
    return ropes[0]


def _one_rope(rope: dict[str, Any], config: dict[str, Any], file: str) -> Rope:
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = _number(rope, "rope_theta", file, 10_000.0)
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise ModelError(
            f"{file} has a rope of type {kind!r} with partial_rotary_factor "
            f"{rope.get('partial_rotary_factor', 1)}; kvjax computes whole 'default' and 'llama3' ropes. "
            "Choose a checkpoint with one of these."
        )
    if kind == "default":
        return Rope(theta=theta)
    # The order of precedence is transformers' own.
    original = "original_max_position_embeddings"
    length = {original: config.get(original, rope.get(original, config.get("max_position_embeddings")))}
    low, high = (_number(rope, key, file) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError(f"{file} has low_freq_factor {low} >= high_freq_factor {high}; it must be below.")
    scaling = Llama3Scaling(
        factor=_number(rope, "factor", file),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_count(length, original, file),
    )
    return Rope(theta=theta, scaling=scaling)


def _write_rope(rope: Rope) -> dict[str, Any]:
    if rope.scaling is None:
        return {"rope_type": "default"}
    s = rope.scaling
    return {
        "rope_type": "llama3",
        "factor": s.factor,
        "low_freq_factor": s.low_freq_factor,
        "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_max_position_embeddings,
    }


def _read_windows(config: dict[str, Any], layers: int, file: str) -> tuple[int | None, ...]:
    """Per layer the sliding window of a qwen2; a llama has none and, as in transformers, no such keys."""
    if config["model_type"] != "qwen2":
        return (None,) * layers
    slides = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    first, types = config.get("max_window_layers", 28), config.get("layer_types")
    if types is None and isinstance(first, int):
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[slides and index >= first] for index in range(layers)]
    known = {"full_attention", "sliding_attention"} if slides else {"full_attention"}
    if not isinstance(types, list) or len(types) != layers or not known.issuperset(types):
        raise ModelError(
            f"{file} has layer_types {types} with use_sliding_window={slides}; for {layers} layers "
            f"kvjax needs {layers} of {', '.join(sorted(known))}. Correct the list or use_sliding_window."
        )
    if not slides:
        return (None,) * layers
    window = _count(config, "sliding_window", file)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ids(generation: dict[str, Any], config: dict[str, Any], key: str, file: str) -> list[int | None]:
    value = config.get(key) if generation.get(key) is None else generation[key]
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if not all(i is None or (isinstance(i, int) and not isinstance(i, bool) and i >= 0) for i in ids):
        raise ModelError(
            f"{file} or generation_config.json has {key} {value!r}; ids are whole numbers from 0."
        )
    return ids


def _count(config: dict[str, Any], key: str, file: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file} has {key} {value!r}; it must be a whole number from 1.")
    return value


def _number(config: dict[str, Any], key: str, file: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file} has {key} {value!r}; it must be a number above 0.")
    return float(value)
