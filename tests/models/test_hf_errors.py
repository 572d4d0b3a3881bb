"""What is no model, or would be another model, is refused in a sentence; a failing save leaves nothing."""

from __future__ import annotations

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvjax.models import hf


def refused(source, *parts, **options):
    with pytest.raises(hf.ModelError) as caught:
        hf.load(source, **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("llama3", {"model_type": "olmoe"}, ["model_type 'olmoe'", "llama, qwen2, qwen3"]),
        ("llama3", {"model_type": ...}, ["model_type None"]),
        ("llama3", {"model_type": "gemma4_text"}, ["later layers read the keys and values of earlier ones"]),
        ("llama3", {"model_type": "qwen3_next"}, ["linear-attention layers hold a state"]),
        (
            "llama3",
            {"attention_bias": True, "hidden_act": "gelu"},
            ["attention_bias=True", "hidden_act='gelu'"],
        ),
        ("llama3", {"mlp_bias": True}, ["mlp_bias=True"]),
        ("qwen2", {"quantization_config": {"bits": 4}}, ["quantised by None", "GGUF"]),
        ("llama3", {"layer_types": ["sliding_attention"] * 2}, ["layer_types"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["use_sliding_window=False"]),
        ("qwen2_window", {"layer_types": ["full_attention"]}, ["2 layers"]),
        ("qwen2_window", {"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention"]),
        ("qwen2_window", {"layer_types": ..., "max_window_layers": "all"}, ["layer_types None"]),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ["type 'dynamic'", "'yarn'"],
        ),
        (
            "qwen2_yarn",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 32.0}},
            ["beta_slow 32.0 >= beta_fast"],
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers [1, 0]", "each of 4 layers"]),
        ("llama3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["0.5"]),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["no flat dict"]),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor None"]),
        ("llama3", {"rope_theta": 5e5}, ["spells its rope twice"]),
        ("llama3", {"rope_scaling": {"type": "default"}}, ["spells its rope twice"]),
        ("llama3", {"hidden_size": ..., "vocab_size": ...}, ["lacks vocab_size, hidden_size"]),
        ("llama3", {"num_hidden_layers": 2.5}, ["num_hidden_layers 2.5", "whole number"]),
        ("llama3", {"num_key_value_heads": 3}, ["3 KV heads"]),
        ("llama3", {"rms_norm_eps": "small"}, ["rms_norm_eps 'small'"]),
        ("llama3", {"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "dtype="]),
        ("llama3", {"num_hidden_layers": 3}, ["model.layers.2.mlp.up_proj.weight is missing"]),
        ("llama3", {"num_hidden_layers": 1}, ["model.layers.1.mlp.up_proj.weight is unknown"]),
        ("llama3", {"head_dim": 8}, ["layers.1.self_attn.o_proj.weight is [32, 64] instead of [32, 32]"]),
    ],
)
def test_configs_that_mean_other_mathematics_are_refused(name, changes, parts, spoil):
    refused(spoil(name, **changes), "config.json", *parts)


def test_impossible_ids_are_refused(spoil):
    folder = spoil("llama3", eos_token_id=["</s>"])
    (folder / "generation_config.json").unlink()
    refused(folder, "eos_token_id ['</s>']")


def test_every_tensor_that_does_not_fit_is_named_at_once(spoil):
    folder = spoil("llama3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].copy()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float64)
    save_file(tensors, folder / "model.safetensors")
    refused(
        folder,
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is unknown",
        "lm_head.weight is [96, 31] instead of [96, 32]",
        "model.embed_tokens.weight is stored as F64",
    )


def test_fp8_tensors_need_a_config_that_scales_them(spoil):
    folder = spoil("llama3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, name, "F8_E4M3", "says how FP8 numbers are scaled")


def test_damaged_files_are_named(spoil):
    folder = spoil("llama3")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for part in (whole[:-100], whole[:1000], b"", b"version https://git-lfs.github.com/spec/v1\noid 0\n"):
        file.write_bytes(part)
        refused(folder, str(file), "not a whole safetensors file", "git lfs pull")
    (folder / "config.json").write_text('{"model_type": ')
    refused(folder, "config.json is not readable JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "holds list instead of an object")


def test_missing_files_are_named(spoil, tmp_path):
    folder = spoil("llama_bf16_sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "lacks 1 of the 2 files", "model-00002-of-00002.safetensors. Download")
    index = folder / "model.safetensors.index.json"
    for value in ({}, {"weight_map": {"x": "../llama3/model.safetensors"}}, {"weight_map": []}):
        index.write_text(json.dumps(value))
        refused(folder, "no weight_map")
    index.unlink()
    refused(folder, "neither model.safetensors nor", "save_pretrained")
    (folder / "config.json").unlink()
    refused(folder, "no config.json")
    refused(tmp_path / "nowhere", "is not a folder")
    refused(str(tmp_path / "nowhere"), "is not a folder")
    refused(str(index.parent / "generation_config.json"), "the folder that holds config.json")


def test_unknown_dtypes_are_refused_as_called(golden_folder, tmp_path):
    refused(golden_folder("llama3"), "dtype='int8'", "float32, bfloat16, float16", dtype="int8")
    model = hf.load(golden_folder("llama3"))
    with pytest.raises(hf.ModelError, match="dtype='fp16'"):
        hf.save(tmp_path / "out", model.spec, model.params, dtype="fp16")


def spoilt_params(model):
    layers = [dict(layer) for layer in model.params["layers"]]
    layers[1]["wq"] = layers[1]["wq"].T
    layers[0]["bq"] = layers[0].pop("wk")
    return {**model.params, "layers": layers}


def too_large(tmp_path, count):
    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")).save(str(file))
    return file


def test_a_failing_save_leaves_nothing(golden_folder, tmp_path):
    model = hf.load(golden_folder("llama3"))
    out = tmp_path / "new" / "out"
    with pytest.raises(hf.ModelError) as caught:
        hf.save(out, model.spec, spoilt_params(model))
    assert "layers.0.bq is unknown; layers.0.wk is missing; layers.1.wq is [32, 16, 4]" in str(caught.value)
    huge = {**model.params, "final_norm": model.params["final_norm"] * 1e6}
    with pytest.raises(hf.ModelError, match=r"model.norm.weight .* float16"):
        hf.save(out, model.spec, huge, dtype="float16", max_shard_bytes=10_000)
    with pytest.raises(hf.ModelError, match="ids up to 96, the model embeds 96"):
        hf.save(out, model.spec, model.params, tokenizer=too_large(tmp_path, 97))
    with pytest.raises(hf.ModelError, match="finds no tokenizer.json"):
        hf.save(out, model.spec, model.params, tokenizer=golden_folder("llama3"))
    with pytest.raises(hf.ModelError, match="damaged or no tokenizer"):
        hf.save(out, model.spec, model.params, tokenizer=golden_folder("llama3") / "config.json")
    with pytest.raises(hf.ModelError, match="metadata"):
        hf.save(out, model.spec, model.params, metadata={"step": 3})
    with pytest.raises(hf.ModelError, match="max_shard_bytes=0"):
        hf.save(out, model.spec, model.params, max_shard_bytes=0)
    assert not out.exists()
    assert list(out.parent.iterdir()) == []
    hf.save(out, model.spec, model.params)
    assert hf.load(out).spec == model.spec


def test_save_replaces_nothing(golden_folder, tmp_path):
    model = hf.load(golden_folder("llama3"))
    (tmp_path / "mine").write_text("precious")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(hf.ModelError, match="will not replace"):
            hf.save(taken, model.spec, model.params)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    hf.save(tmp_path / "empty", model.spec, model.params)
    assert hf.load(tmp_path / "empty").spec == model.spec
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "mine"]


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"family": "qwen2"},
        {"windows": (4, None)},
        {"family": "qwen2", "qkv_bias": True, "windows": (4, 8)},
    ],
)
def test_specs_the_format_cannot_express_are_refused(changes, golden_folder, tmp_path):
    model = hf.load(golden_folder("llama3"))
    with pytest.raises(hf.ModelError, match="cannot write family"):
        hf.save(tmp_path / "out", dataclasses.replace(model.spec, **changes), model.params)
    assert list(tmp_path.iterdir()) == []
