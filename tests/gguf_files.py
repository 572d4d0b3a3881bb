"""GGUF files for tests: tiny quantised models of every architecture, and any folder as llama.cpp converts it.

What differs between the two formats is written here after llama.cpp's convert_hf_to_gguf.py, not with our
reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy the name "bfloat16"
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

VOCAB = 96
HIDDEN, MLP, HEADS, KV_HEADS = 64, 256, 4, 2
LAYERS = {"gemma3": 6}
"""Others have 2; of a Gemma 3 every sixth layer sees everything."""

WINDOW = 5
SHORT = tuple(1 + 0.1 * i for i in range(8))
LONG = tuple(1 + 0.5 * i for i in range(8))
"""Factors of a Phi-3."""

ORIGINAL, LONGEST = 64, 4096

# The quantisations of the matrices in turn, and of each layer's last one, whose rows have 256 entries.
_KINDS = ("Q8_0", "Q4_0", "Q5_1", "F16", "Q4_1", "Q5_0", "BF16", "F32")
_K_KINDS = ("Q4_K", "Q6_K", "Q2_K", "Q5_K", "Q3_K", "Q4_0")
# Where the blocks of these hold their float16 factors, and what makes entries of about 0.1.
_FACTORS = {
    "Q2_K": ((80, 4e-3), (82, 4e-3)),
    "Q3_K": ((108, 1e-3),),
    "Q4_K": ((0, 3e-4), (2, 3e-4)),
    "Q5_K": ((0, 1.5e-4), (2, 3e-4)),
    "Q6_K": ((208, 3e-5),),
    "IQ4_NL": ((0, 1e-3),),
}


def write(path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A file of these keys (of the architecture where they begin with a dot) and tensors.

    Args:
      path, arch: of the file.
      keys: whole numbers, floats, bools, text and lists of them.
      tensors: float32 arrays, or pairs of an array and a quantisation.
    """
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        _add(writer, f"{arch}{key}" if key.startswith(".") else key, value)
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, "F32")
        if kind in ("F32", "F16"):
            writer.add_tensor(name, array.astype(np.float32 if kind == "F32" else np.float16))
        else:
            number = GGMLQuantizationType[kind]
            blocks = array if array.dtype == np.uint8 else quants.quantize(array, number)
            writer.add_tensor(name, blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


# --- tiny models -----------------------------------------------------------------------------------


def tiny(
    path: Path, arch: str, keys: Mapping[str, Any] | None = None, *, vocab: int = VOCAB, **replaced: Any
) -> Path:
    """A random model of an architecture; its matrices are quantised in most ways that are read.

    Args:
      path, arch: of the file.
      keys: beside those of the sizes and of a tokenizer, or instead; None takes one away.
      vocab: tokens that are embedded.
      replaced: tensors by name.
    """
    rng, layers = np.random.default_rng(abs(hash_of(arch))), LAYERS.get(arch, 2)
    size = head_dim(arch)
    q, kv = HEADS * size, KV_HEADS * size
    shapes = {"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, q), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN)}
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if arch == "phi3":
        shapes = {"attn_qkv": (q + 2 * kv, HIDDEN), "attn_output": (HIDDEN, q), "ffn_up": (2 * MLP, HIDDEN)}
    if arch.startswith("gemma"):
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    if arch in ("qwen3", "gemma3"):
        norms |= {"attn_q_norm": size, "attn_k_norm": size}
    tensors: dict[str, Any] = {
        "token_embd.weight": (rng.normal(size=(vocab, HIDDEN)).astype(np.float32), "Q8_0"),
        "output_norm.weight": _scale(rng, HIDDEN),
    }
    if arch in ("llama", "phi3"):
        tensors["output.weight"] = (_matrix(rng, (vocab, HIDDEN)), "Q8_0")
    if arch == "llama":
        tensors["rope_freqs.weight"] = llama3_factors(10_000.0, size, 8.0, 8192)
    if arch == "phi3":
        tensors["rope_factors_short.weight"] = np.asarray(SHORT, np.float32)
        tensors["rope_factors_long.weight"] = np.asarray(LONG, np.float32)
    kinds = iter(_KINDS * layers * 8)
    for layer in range(layers):
        named = {name: _scale(rng, size) for name, size in norms.items()}
        named |= {name: (_matrix(rng, shape), next(kinds)) for name, shape in shapes.items()}
        named["ffn_down"] = k_quant(rng, _K_KINDS[layer % len(_K_KINDS)], HIDDEN)
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in named.items()}
        if arch == "qwen2":
            biases = {"attn_q": q, "attn_k": kv, "attn_v": kv}
            tensors |= {f"blk.{layer}.{n}.bias": rng.normal(size=s).astype("f4") for n, s in biases.items()}
    every = {**sizes(arch, layers), **TOKENIZER, **(keys or {})}
    every = {key: value for key, value in every.items() if value is not None}
    return write(path, arch, every, {**tensors, **replaced})


def head_dim(arch: str) -> int:
    """Of a Phi-3 transformers takes D / N only."""
    return HIDDEN // HEADS if arch == "phi3" else 32


def sizes(arch: str, layers: int) -> dict[str, Any]:
    """The keys of ``tiny``."""
    keys = {
        ".block_count": layers,
        ".context_length": LONGEST,
        ".embedding_length": HIDDEN,
        ".feed_forward_length": MLP,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV_HEADS,
        ".attention.key_length": head_dim(arch),
        ".attention.value_length": head_dim(arch),
        ".attention.layer_norm_rms_epsilon": 1e-6,
        ".rope.dimension_count": head_dim(arch),
        ".rope.freq_base": 1_000_000.0 if arch == "gemma3" else 10_000.0,
    }
    if arch in ("gemma2", "gemma3", "phi3"):
        keys[".attention.sliding_window"] = WINDOW
    if arch == "gemma2":
        keys |= {".attn_logit_softcapping": 50.0, ".final_logit_softcapping": 30.0}
    if arch == "phi3":
        keys |= {".rope.scaling.original_context_length": ORIGINAL, ".rope.scaling.attn_factor": 1.25}
    return keys


ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


def hash_of(word: str) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(word.encode(), "little") % 2**32


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """What convert_hf_to_gguf.py writes as rope_freqs.weight for a rope of type llama3."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(
        wavelength < original / 4.0, 1.0, np.where(wavelength > original / 1.0, factor, between)
    )
    return factors.astype(np.float32)


def _matrix(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return (rng.normal(size=shape) * 0.2).astype(np.float32)


def _scale(rng: np.random.Generator, size: int) -> np.ndarray:
    """Of a norm, about 1: files of Gemmas hold the scale itself, not the scale minus one."""
    return (1 + 0.1 * rng.normal(size=size)).astype(np.float32)


def k_quant(rng: np.random.Generator, kind: str, rows: int) -> tuple[np.ndarray, str]:
    """Random blocks of rows of ``MLP``: some quantisations the gguf package reads and does not write."""
    if kind not in _FACTORS:
        return _matrix(rng, (rows, MLP)), kind
    block, size = quants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, MLP // block, size), np.uint8)
    for at, factor in _FACTORS[kind]:
        blocks[:, :, at : at + 2] = np.asarray([factor], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1), kind


# --- tokenizers ------------------------------------------------------------------------------------


def byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]


def byte_level(pre: str | None, merges: Sequence[str] = ("t h", "th e"), **more: Any) -> dict[str, Any]:
    """The keys of a byte-level tokenizer: <s>, </s>, the bytes and what the merges make."""
    tokens = ["<s>", "</s>", *byte_tokens(), *(merge.replace(" ", "") for merge in merges)]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": list(merges),
        "bos_token_id": 0,
        "eos_token_id": 1,
        **({} if pre is None else {"pre": pre}),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


TOKENIZER = byte_level("gpt-2")


# --- folders ---------------------------------------------------------------------------------------

_ROWS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_ROWS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def of_folder(folder: Path, path: Path) -> Path:
    """A folder of transformers 5 as a GGUF file of float32."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, kind)
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    keys = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": heads,
        ".attention.head_count_kv": kv_heads,
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        ".rope.freq_base": rope["rope_theta"],
        ".rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": np.ravel(config["eos_token_id"])[0].item(),
    }
    if config.get("sliding_window"):
        keys[".attention.sliding_window"] = config["sliding_window"]
    if local:
        keys[".rope.freq_base_swa"] = local["rope_theta"]
        slides = [one == "sliding_attention" for one in config["layer_types"]]
        keys[".attention.sliding_window_pattern"] = slides
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        keys |= {f".{key}": config[key]} if config.get(key) else {}
    tensors: dict[str, Any] = {}
    if rope["rope_type"] == "linear":
        keys |= {".rope.scaling.type": "linear", ".rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "llama3":
        original = rope["original_max_position_embeddings"]
        tensors["rope_freqs.weight"] = llama3_factors(rope["rope_theta"], head_dim, rope["factor"], original)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        ratio = config["max_position_embeddings"] / original
        keys[".rope.scaling.original_context_length"] = original
        keys[".rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(ratio) / np.log(original)))
        for which in ("short", "long"):
            tensors[f"rope_factors_{which}.weight"] = np.asarray(rope[f"{which}_factor"], np.float32)
    rows = {**_ROWS, **(_GEMMA_ROWS if arch.startswith("gemma") else {})}
    for name, stored in load_file(folder / "model.safetensors").items():
        array = stored.astype(np.float32)
        if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            gguf_name = {"e": "token_embd.weight", "n": "output_norm.weight"}.get(name[6], "output.weight")
        else:
            _, _, layer, part = name.split(".", 3)
            part, leaf = part.rsplit(".", 1)
            gguf_name = f"blk.{layer}.{rows[part]}.{leaf}"
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else kv_heads
            array = array.reshape(n, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        tensors[gguf_name] = array
    return write(path, arch, keys, tensors)
