"""What sets families apart: spellings of configs, names of tensors, and how policies meet them."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import decode
from kvjax.models import decoder, hf
from kvjax.models.families import FAMILIES
from kvjax.models.module import Decoder, leaves
from kvjax.models.rope import LinearScaling, Rope
from kvjax.models.spec import ModelSpec
from kvjax.policy import Policy

# config.json of each golden as transformers 4 would have said it; ... removes a key.
OLD_SPELLING = {
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None},
    "mistral": {"rope_theta": 1e6},
    "phi3": {"rope_theta": 1e4, "rope_scaling": None, "head_dim": 8},
    "phi3_long": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 3.0, 4.5, 6.0],
        },
    },
    "phi4_mini": {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.5, 3.0, 4.5],
        },
    },
    "gemma2": {"rope_theta": 1e4, "layer_types": ..., "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": ...,
        "sliding_window_pattern": 3,
    },
    "gpt2": {"n_ctx": 512},
}


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_both_spellings_are_one_spec(name, golden_folder, spoil):
    new = hf.load(golden_folder(name)).spec
    assert hf.load(spoil(name, rope_parameters=..., **OLD_SPELLING[name])).spec == new


def test_every_family_has_a_golden(golden_folder):
    names = ["llama3", "qwen2", *OLD_SPELLING]
    assert {hf.load(golden_folder(name)).spec.family for name in names} == set(FAMILIES)


def test_gemma3_has_a_rope_for_each_type_of_layer(golden_folder):
    spec = hf.load(golden_folder("gemma3")).spec
    far = Rope(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert [spec.rope_of(i) for i in range(4)] == [Rope(), Rope(), far, Rope()]


def test_gemma3_with_vision_gives_its_text_model(golden_folder, spoil):
    folder = spoil("gemma3")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        inside = {k.replace("model.", prefix, 1): v for k, v in tensors.items()}
        seen = {"vision_tower.x": np.ones(3, np.float32), "multi_modal_projector.y": np.ones(3, np.float32)}
        save_file({**inside, **seen}, folder / "model.safetensors")
        found, want = hf.load(folder), hf.load(golden_folder("gemma3"))
        assert found.spec == want.spec
        jax.tree.map(np.testing.assert_array_equal, found.params, want.params)


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_base_models_without_the_prefix_are_read(name, golden_folder, spoil):
    folder = spoil(name)
    tensors = load_file(folder / "model.safetensors")
    bare = {k.removeprefix("transformer.").removeprefix("model."): v for k, v in tensors.items()}
    if name == "gpt2":  # buffers of old checkpoints
        bare |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.ones(1, "f4")}
    save_file(bare, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder).params, hf.load(golden_folder(name)).params)


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_the_module_draws_every_leaf(name, golden_folder):
    """NNX declares the weights of any family: the tree of a loaded model, and logits that are numbers."""
    model = hf.load(golden_folder(name))
    module = Decoder(model.spec, rngs=nnx.Rngs(0))
    drawn = leaves(module)
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, model.params)
    assert np.isfinite(module(jnp.arange(6)[None])).all()
    gain = 0.0 if model.spec.norm == "rms_plus_one" else 1.0
    assert (drawn["layers"][0]["attn_norm"] == gain).all()


# --- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "windows"), [("mistral", (6, 6)), ("gemma2", (6, None))])
def test_sliding_layers_are_rings_and_take_no_policy(name, windows, golden_folder, golden_data):
    """Full layers follow the policy; a sliding layer holds min(W_model, context) tokens under any policy."""
    model = hf.load(golden_folder(name))
    assert model.spec.windows == windows
    prompt = golden_data(name)["tokens"][0].tolist()
    for policy in (Policy(), kvjax.policy("window(4) + sinks(2)"), kvjax.policy("snapkv(4) + uniform(12)")):
        state, _ = decode.prefill(model, policy, [prompt], context=64)
        for room, window in zip(state.layers, windows):
            if window is not None:
                assert (room.ring.window, room.pages) == (6, None)
            elif policy == Policy():
                assert (room.ring.window, room.pages) == (64, None)
            else:
                held = room.ring.window + np.asarray(room.pages.length).sum(axis=-1)
                assert (held < len(prompt)).all()
    with pytest.warns(UserWarning, match="own sliding window rules"):
        decode.generate(model, kvjax.policy("window(4) + sinks(2)"), [prompt[:3]], max_new_tokens=1)
    short, _ = decode.prefill(model, Policy(), [prompt[:3]], context=4)
    assert [room.ring.window for room in short.layers] == [4, 4]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "snapkv(4) + uniform(4096)") for name in ("gemma2", "gemma3", "phi4_mini", "gpt2")),
        ("gemma2", "int8(512)"),
        ("gemma2", "quest(pages=512)"),
    ],
)
def test_a_policy_that_drops_nothing_changes_no_text(name, policy, golden_folder, golden_data):
    """Whole prompts layer by layer and pages read the way the family attends: caps, gains, two ropes."""
    model, data = hf.load(golden_folder(name)), golden_data(name)
    made = decode.generate(model, kvjax.policy(policy), [data["prompt"].tolist()], max_new_tokens=32, page=16)
    assert made.tokens == [data["greedy"].tolist()]


def test_scores_behind_the_seam_are_the_model_s(golden_folder):
    """q k / sqrt(H) is the model's score also where it divides by another number."""
    spec = dataclasses.replace(hf.load(golden_folder("gemma2")).spec, norm="rms", windows=(None, None))
    seen = {}
    for scalar in (None, 24.0):
        module = Decoder(dataclasses.replace(spec, query_pre_attn_scalar=scalar), rngs=nnx.Rngs(0))

        def look(index, heads, carry, scalar=scalar):
            seen[scalar] = heads
            return jnp.zeros_like(heads.q), carry

        tokens = jnp.arange(5)[None]
        decoder.forward(module.spec, leaves(module), tokens, tokens, look, None)
    np.testing.assert_allclose(seen[24.0].q, seen[None].q * (16 / 24) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(seen[24.0].q_pre, seen[None].q_pre * (16 / 24) ** 0.5, rtol=1e-6)
    np.testing.assert_array_equal(seen[24.0].k, seen[None].k)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("qwen3", {"attention_bias": True}, ["attention_bias=True"]),
        ("qwen3", {"model_type": "qwen3_moe"}, ["'qwen3_moe'"]),
        ("mistral", {"layer_types": ["full_attention"] * 2}, ["sliding_window=6"]),
        ("mistral", {"num_key_value_heads": ...}, ["lacks num_key_value_heads"]),
        ("phi3", {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ("phi3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'"]),
        ("phi4_mini", {"num_attention_heads": 8}, ["a list of 1 numbers"]),
        ("phi4_mini", {"partial_rotary_factor": 0.5, "rope_parameters": ...}, []),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ("gemma2", {"attn_logit_softcapping": -1.0}, ["attn_logit_softcapping -1.0"]),
        ("gemma2", {"layer_types": ..., "sliding_window_pattern": "all"}, ["layer_types None"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, ["one rope for 'full_attention'"]),
        ("gemma3", {"rope_theta": 5e5}, ["spells its rope twice"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function='relu'"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True"]),
        ("gpt2", {"n_embd": ...}, ["lacks n_embd"]),
        ("gpt2", {"n_positions": 256}, ["transformer.wpe.weight is [512, 32] instead of [256, 32]"]),
    ],
)
def test_other_mathematics_is_refused(name, changes, parts, spoil):
    folder = spoil(name, **changes)
    if not parts:
        assert hf.load(folder).spec.rope.fraction == 0.5
        return
    with pytest.raises(hf.ModelError) as caught:
        hf.load(folder)
    assert all(part in str(caught.value) for part in ["config.json", *parts])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"qk_norm": True}),
        ("llama3", {"attn_softcap": 50.0}),
        ("qwen3", {"qk_norm": False}),
        ("mistral", {"windows": (6, None)}),
        ("mistral", {"windows": (6, 8)}),
        ("gemma2", {"local_rope": Rope()}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"norm": "rms"}),
        ("gpt2", {"num_kv_heads": 2}),
        ("gpt2", {"rope": Rope(theta=5.0)}),
    ],
)
def test_specs_a_family_cannot_say_are_not_written(name, changes, golden_folder, tmp_path):
    model = hf.load(golden_folder(name))
    with pytest.raises(hf.ModelError, match="cannot write family") as caught:
        hf.save(tmp_path / "out", dataclasses.replace(model.spec, **changes), model.params)
    assert next(iter(changes)) in str(caught.value)


def test_a_spec_is_the_same_in_any_context_but_for_longrope(golden_folder):
    spec: ModelSpec = hf.load(golden_folder("gemma3")).spec
    assert spec.at(10**6) == spec
    long = hf.load(golden_folder("phi3_long")).spec
    assert long.at(65) != long == long.at(64)
