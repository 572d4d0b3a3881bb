"""GGUF files that cannot be read, or would be another model, are refused in one sentence and at once."""

from __future__ import annotations

import builtins
import struct

import gguf_files as files
import numpy as np
import pytest

import kvjax
from kvjax.cli import InputError
from kvjax.models import hf
from kvjax.serve import command


def refused(file, *parts, **options):
    with pytest.raises(hf.ModelError) as caught:
        kvjax.load(file, **options)
    said = str(caught.value)
    assert str(file) in said
    assert "\n" not in said
    assert said.endswith((".", "'kvjax[gguf]'"))
    for part in parts:
        assert part in said


@pytest.fixture
def tiny(tmp_path):
    return lambda arch="qwen2", keys=None, **more: files.tiny(tmp_path / "tiny.gguf", arch, keys, **more)


@pytest.mark.parametrize(
    ("arch", "keys", "parts"),
    [
        ("llama", {".expert_count": 8}, ["llama.expert_count 8", "folder in Hugging Face's format"]),
        ("llama", {".attn_logit_softcapping": 30.0}, ["attn_logit_softcapping=30.0"]),
        ("llama", {".attention.causal": False}, ["attention.causal=False"]),
        ("llama", {".attention.value_length": 16}, ["values of another length"]),
        (
            "qwen2",
            {".block_count": None, ".context_length": None},
            ["lacks qwen2.context_length, qwen2.block_count"],
        ),
        ("qwen2", {".block_count": 2**32 - 1}, ["block_count 4294967295", "2 layers"]),
        ("qwen2", {".block_count": 3}, ["block_count 3"]),
        ("qwen2", {".attention.head_count_kv": [2, 1]}, ["one number as qwen2.attention.head_count_kv"]),
        ("qwen2", {".attention.head_count": 0}, ["num_attention_heads 0"]),
        ("qwen2", {".attention.head_count": 3}, ["3 query heads"]),
        (
            "qwen2",
            {".attention.head_count": 8},
            ["self_attn.q_proj.weight is [128, 64] instead of [256, 64]"],
        ),
        (
            "qwen2",
            {f".attention.{part}_length": 16 for part in ("key", "value")} | {".rope.dimension_count": 16},
            ["instead of [64, 64]"],
        ),
        ("qwen2", {".attention.sliding_window": 16}, ["sliding window of 16"]),
        ("qwen2", {".rope.dimension_count": 16}, ["partial_rotary_factor=0.5"]),
        ("qwen2", {".rope.scaling.type": "dynamic", ".rope.scaling.factor": 4.0}, ["type 'dynamic'"]),
        ("gemma3", {".attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ("gemma2", {".attention.sliding_window_pattern": [True]}, ["layer_types"]),
        ("qwen2", {"split.count": 3}, ["one of 3 parts", "llama-gguf-split --merge"]),
        ("qwen2", {"general.alignment": 24}, ["general.alignment 24"]),
    ],
)
def test_metadata_that_mean_another_model(arch, keys, parts, tiny):
    refused(tiny(arch, keys), *parts)


def test_architectures_that_are_not_read(tiny):
    file = tiny()
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"mamba"))
    refused(file, "architecture 'mamba'", "llama, qwen2, qwen3")


def test_experts_of_an_architecture_that_is_not_read_are_the_reason_given(tiny):
    file = tiny("qwen2", {".expert_count": 4})
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"qwen9"))
    refused(file, "qwen9.expert_count 4", "no experts from GGUF files")


def test_quantisations_that_are_not_read(tiny):
    blocks = np.zeros((files.HIDDEN, 84), np.uint8)
    refused(
        tiny(**{"blk.0.ffn_down.weight": (blocks[:, :66], "TQ2_0")}), "blk.0.ffn_down.weight as TQ2_0", "Q4_K"
    )


def test_tensors_that_are_missing_or_unknown(tiny):
    experts = np.zeros((2, 4, 4), np.float32)
    refused(
        tiny(**{"blk.0.ffn_up_exps.weight": experts}), "blk.0.ffn_up_exps.weight is unknown", "its metadata"
    )
    refused(tiny("gemma2", **{"blk.0.ffn_norm.weight": np.zeros(3, np.float32)}), "[3] instead of [64]")


@pytest.mark.parametrize("share", [0.999, 0.9, 0.5, 0.1, 0.01])
def test_files_that_are_cut_off(share, tiny):
    file = tiny()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    refused(file, "Download it again.")


def test_every_cut_of_the_header_is_refused(tiny):
    file = tiny()
    header = file.read_bytes()[:6000]
    for end in (4, 7, 8, 15, 24, *range(25, 6000, 61)):
        file.write_bytes(header[:end])
        refused(file)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\x03\x04" * 20, b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_files_of_another_kind(content, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refused(file, "not GGUF", "folder that holds config.json")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions(version, tiny):
    file = tiny()
    file.write_bytes(b"GGUF" + struct.pack("<I", version) + file.read_bytes()[8:])
    refused(file, f"version {version}")


HUGE = 2**63


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<QQ", HUGE, 0),  # tensors
        struct.pack("<QQ", 0, HUGE),  # keys
        struct.pack("<QQQ", 0, 1, HUGE),  # the length of a key
        struct.pack("<QQQ1sIQ", 0, 1, 1, b"k", 8, HUGE),  # of a text
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 5, HUGE),  # of a list of numbers
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, HUGE),  # of a list of text
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1),  # a list of lists
        struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77),  # of no type
        struct.pack("<QQQ1sI", 1, 0, 1, b"t", 2**31),  # dimensions
        struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, HUGE, 0, 0),  # a tensor's size
        struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 4, 0, HUGE),  # its place
        struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 0, 0, 0),  # nothing in it
        struct.pack("<QQQ2sIB", 0, 1, 2, b"\xff\xfe", 0, 1),  # a key that is not text
        struct.pack("<QQ", 0, 2) + struct.pack("<Q1sIB", 1, b"k", 0, 1) * 2,  # a key twice
        struct.pack("<QQ", 0, 0),  # nothing at all
    ],
)
def test_hostile_sizes_take_no_memory(header, tmp_path):
    file = tmp_path / "hostile.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + header + bytes(64))
    refused(file)


def test_the_package_that_dequantises_may_be_missing(tiny, monkeypatch):
    file = tiny()
    real = builtins.__import__

    def without(name, *more, **options):
        if name == "gguf":
            raise ImportError("No module named 'gguf'")
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(file, "needs the gguf package", "pip install 'kvjax[gguf]'")


def test_a_float16_that_overflows(tiny):
    large = np.full((files.HIDDEN, files.MLP), 1e6, np.float32)
    with pytest.raises(hf.ModelError, match="beyond float16's"):
        kvjax.load(tiny(**{"blk.0.ffn_down.weight": large}), "float16")


# --- tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"pre": "klingon"}, "rule 'klingon' (tokenizer.ggml.pre)"),
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"model": None}, "kind None"),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokens": [1, 2, 3]}, "lacks tokenizer.ggml.tokens"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["t h", "one"]}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["t 日"]}, "make no tokenizer"),
        ({"token_type": [1, 1]}, "token_type that is not a list of 260 numbers"),
        ({"model": "llama", "scores": [0.0]}, "scores that is not a list of 260 numbers"),
    ],
)
def test_tokenizers_that_are_not_read(keys, part, tiny):
    model = kvjax.load(tiny("qwen2", {f"tokenizer.ggml.{key}": value for key, value in keys.items()}))
    with pytest.raises(ValueError, match="tiny.gguf") as caught:
        _ = model.text
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_refuses_before_it_answers(tiny):
    with pytest.raises(InputError, match="klingon"):
        command.load_model(str(tiny("qwen2", {"tokenizer.ggml.pre": "klingon"})), None)
    with pytest.raises(InputError, match="finds no such package"):
        command.load_model("package:no_such_package", None)
