"""Config files as the families' publishers wrote them (sizes and every key that bears on mathematics).

The goldens are tiny and spelt by transformers; these have the old keys, the omissions and the traps of the
files people load. Only configs are read: the weights are gigabytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvjax.models.hf_config import read_config
from kvjax.models.rope import LinearScaling, Llama3Scaling, LongRope, Rope

PUBLISHED = json.loads((Path(__file__).parents[1] / "golden" / "published.json").read_text())
_SHORT, _LONG = [1.0 + 0.01 * i for i in range(48)], [1.0 + i for i in range(48)]
"""In the place of Phi's searched factors."""

_STRETCH = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LONGROPE = LongRope(
    short=tuple(_SHORT),
    long=tuple(_LONG),
    original_max_position_embeddings=4096,
    attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
)
SPECS = {
    "Llama-3.1-8B-Instruct": {
        "head_dim": 128,
        "rope": Rope(theta=500_000.0, scaling=_STRETCH),
        "eos": (128_001, 128_008, 128_009),
        "tied": False,
    },
    # sliding_window is there and not in use
    "Qwen2.5-0.5B": {"head_dim": 64, "windows": (None,) * 24, "qkv_bias": True, "tied": True},
    # head_dim is not D / N; generation_config knows one more end
    "Qwen3-0.6B": {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "eos": (151_645, 151_643)},
    "Mistral-7B-v0.1": {"windows": (4096,) * 32, "rope": Rope(theta=1e4), "norm_eps": 1e-5},
    "Mistral-7B-v0.3": {"windows": (None,) * 32, "rope": Rope(theta=1e6)},
    "Mistral-Nemo-Base-2407": {"head_dim": 128, "model_dim": 5120, "num_layers": 40},
    "Phi-3-mini-4k-instruct": {
        "head_dim": 96,
        "windows": (2047,) * 32,
        "eos": (32_000, 32_001, 32_007),
        "rope": Rope(theta=1e4),
    },
    # a window beyond the longest context is none
    "Phi-3-mini-128k-instruct": {
        "head_dim": 96,
        "windows": (None,) * 32,
        "rope": Rope(theta=1e4, scaling=_LONGROPE),
        "tied": False,
    },
    "Phi-4-mini-instruct": {
        "head_dim": 128,
        "windows": (None,) * 32,
        "rope": Rope(theta=1e4, scaling=_LONGROPE, fraction=0.75),
        "tied": True,
    },
    "gemma-2-27b-it": {
        "tied": True,  # left out
        "query_pre_attn_scalar": 144.0,
        "windows": (4096, None) * 23,
        "attn_softcap": 50.0,
        "final_softcap": 30.0,
        "scaled_embedding": True,
        "mlp": "geglu",
        "eos": (1, 107),
    },
    "gemma-3-1b-it": {
        "windows": ((512,) * 5 + (None,)) * 4 + (512, 512),
        "rope": Rope(theta=1e6),
        "local_rope": Rope(theta=1e4),
        "attn_softcap": None,
        "qk_norm": True,
        "num_kv_heads": 1,
    },
    # most keys left out
    "gemma-3-12b-it": {
        "vocab_size": 262_208,
        "head_dim": 256,
        "max_positions": 131_072,
        "windows": ((1024,) * 5 + (None,)) * 8,
        "rope": Rope(theta=1e6, scaling=LinearScaling(factor=8.0)),
        "local_rope": Rope(theta=1e4),
        "query_pre_attn_scalar": 256.0,
        "tied": True,
        "eos": (1, 106),
    },
    # n_inner left out: 4 D
    "gpt2": {
        "mlp_dim": 3072,
        "num_kv_heads": 12,
        "head_dim": 64,
        "norm": "layer",
        "norm_eps": 1e-5,
        "tied": True,
        "positions": "learned",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_meant(name):
    spec = read_config(PUBLISHED[name]["config"], PUBLISHED[name]["generation"], "config.json")
    assert {field: getattr(spec, field) for field in SPECS[name]} == SPECS[name]


def test_longrope_of_a_published_config_follows_the_context():
    """Phi-3-mini-128k: short factors up to 4096 tokens, long ones beyond, one attention factor for both."""
    rope = read_config(PUBLISHED["Phi-3-mini-128k-instruct"]["config"], {}, "config.json").rope
    plain = Rope(theta=1e4).frequencies(96)
    assert rope.at(4096).frequencies(96) == pytest.approx(plain / _SHORT, rel=1e-6)
    assert rope.at(4097).frequencies(96) == pytest.approx(plain / _LONG, rel=1e-6)
    assert rope.at(4096).amplitude == rope.at(4097).amplitude == pytest.approx(1.190238)
