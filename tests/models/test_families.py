"""What sets families apart: spellings of configs, names of tensors, weights to be trained."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvjax.models import decoder, hf
from kvjax.models.families import FAMILIES
from kvjax.models.hf_config import read_config
from kvjax.models.module import Decoder, leaves
from kvjax.models.rope import LinearScaling, LongRope, Rope, rotate
from kvjax.models.spec import Experts, ModelSpec

logits_of = functools.partial(jax.jit, static_argnums=0)(decoder.dense_logits)
SPELLED = json.loads((Path(__file__).parents[1] / "golden" / "transformers4.json").read_text())
"""The config.json of each golden as transformers 4 writes it; made by tests/check_exports.py."""


QWEN3_MOE = Experts(count=6, chosen=2, width=16, normed=False, dense_layers=(1,))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_are_one_spec(name, key, golden_folder, spoil):
    """The folders are as transformers 5 writes them; the dtype's key changed within transformers 4."""
    new, old = hf.load(golden_folder(name)).spec, dict(SPELLED[name])
    old[key] = old.pop("dtype")
    assert "rope_parameters" not in old
    folder = spoil(name)
    (folder / "config.json").write_text(json.dumps(old))
    assert hf.load(folder).spec == new
    assert hf.load(folder).params["embed"].dtype == "float32"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phi3_long", {"rope_scaling": {**SPELLED["phi3_long"]["rope_scaling"], "type": "su"}}),
        ("gemma2", {"layer_types": ..., "hidden_act": "gelu_pytorch_tanh"}),
        ("gemma3", {"layer_types": ..., "sliding_window_pattern": 3, "_sliding_window_pattern": ...}),
        ("gpt2", {"n_ctx": 512, "n_inner": 40}),
        ("qwen2_window", {"layer_types": ...}),
    ],
)
def test_still_older_spellings_are_the_same_spec(name, changes, golden_folder, spoil):
    folder = spoil(name)
    config = {k: v for k, v in {**SPELLED[name], **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    assert hf.load(folder).spec == hf.load(golden_folder(name)).spec


def test_every_family_has_a_golden(golden_folder):
    names = [name for name in SPELLED if name != "transformers"]
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
        loaded, want = hf.load(folder), hf.load(golden_folder("gemma3"))
        assert loaded.spec == want.spec
        jax.tree.map(np.testing.assert_array_equal, loaded.params, want.params)


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_base_models_without_the_prefix_are_read(name, golden_folder, spoil):
    folder = spoil(name)
    tensors = load_file(folder / "model.safetensors")
    bare = {k.removeprefix("transformer.").removeprefix("model."): v for k, v in tensors.items()}
    if name == "gpt2":  # buffers of old checkpoints
        bare |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.ones(1, "f4")}
    save_file(bare, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder).params, hf.load(golden_folder(name)).params)


def test_the_module_draws_every_leaf(name, golden_folder):
    """NNX declares the weights of any family: the tree of a loaded model, and logits that are numbers."""
    model = hf.load(golden_folder(name))
    module = Decoder(model.spec, rngs=nnx.Rngs(0))
    drawn = leaves(module)
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, model.params)
    assert np.isfinite(logits_of(model.spec, drawn, jnp.arange(6)[None])).all()
    gain = 0.0 if model.spec.norm == "rms_plus_one" else 1.0
    assert (drawn["final_norm"] == gain).all()


@pytest.mark.parametrize(
    ("name", "key", "field", "value"),
    [
        ("gpt2", "layer_norm_epsilon", "norm_eps", 1e-5),
        ("phi3", "rms_norm_eps", "norm_eps", 1e-5),
        ("mistral", "rms_norm_eps", "norm_eps", 1e-6),
        ("gpt2", "tie_word_embeddings", "tied", True),
        ("gemma2", "tie_word_embeddings", "tied", True),
        ("gemma2", "final_logit_softcapping", "final_softcap", 30.0),
        ("gemma2", "attn_logit_softcapping", "attn_softcap", 50.0),
        ("gemma2", "query_pre_attn_scalar", "query_pre_attn_scalar", 256.0),
        ("gemma3", "final_logit_softcapping", "final_softcap", None),
        ("qwen2_window", "sliding_window", "windows", (None, None)),  # 4096 of 1024 positions
        ("gpt_oss", "sliding_window", "windows", (128, None)),
        ("mixtral", "rms_norm_eps", "norm_eps", 1e-5),
        ("qwen3_moe", "norm_topk_prob", "experts", QWEN3_MOE),
        ("qwen3_moe", "decoder_sparse_step", "experts", QWEN3_MOE),
        ("phi3", "sliding_window", "windows", (None, None)),
        ("mistral", "sliding_window", "windows", (None, None)),
    ],
)
def test_a_key_left_out_has_its_family_s_default(name, key, field, value, golden_folder):
    config = json.loads((golden_folder(name) / "config.json").read_text())
    config.pop(key, None)
    assert getattr(read_config(config, {}, "config.json"), field) == value
    longer = {**config, "max_position_embeddings": 8192}
    windows = {"qwen2_window": (None, 4096), "mistral": (4096, 4096), "gpt_oss": (128, None)}
    if field == "windows":
        assert read_config(longer, {}, "config.json").windows == windows.get(name, value)


def test_every_second_layer_may_have_experts(golden_folder):
    config = json.loads((golden_folder("qwen3_moe") / "config.json").read_text())
    spec = read_config({**config, "decoder_sparse_step": 2, "mlp_only_layers": []}, {}, "config.json")
    assert spec.experts.dense_layers == (0, 2)


def test_gpt_oss_without_a_rope_has_its_family_s(golden_folder):
    config = json.loads((golden_folder("gpt_oss") / "config.json").read_text())
    rope = read_config({**config, "rope_parameters": None}, {}, "config.json").rope
    assert (rope.theta, rope.scaling.factor, rope.scaling.truncate) == (150_000.0, 32.0, False)


def test_a_window_that_tells_two_ropes_apart_stays(golden_folder):
    """Gemma 3's sliding layers keep their rope however wide they are."""
    config = json.loads((golden_folder("gemma3") / "config.json").read_text())
    spec = read_config({**config, "sliding_window": 2048}, {}, "config.json")
    assert spec.windows == (2048, 2048, None, 2048)


def test_gemma_s_embedding_scale_is_rounded_to_the_weights_dtype(golden_folder):
    """sqrt(1152) is 34 in bfloat16, and the product with 33.94 is another number for some weights."""
    spec = dataclasses.replace(hf.load(golden_folder("gemma3")).spec, model_dim=1152)
    values = jnp.linspace(1, 2, 129).astype(jnp.bfloat16)
    table = {"embed": jnp.broadcast_to(values[:, None], (129, 1152))}
    embedded = decoder.embed(spec, table, jnp.arange(129)[None], jnp.arange(129)[None])[0, :, 0]
    assert embedded.dtype == jnp.bfloat16
    exact = values.astype(jnp.float32)
    np.testing.assert_array_equal(embedded, (exact * 34).astype(jnp.bfloat16))
    assert (embedded != (exact * 1152**0.5).astype(jnp.bfloat16)).any()


def test_norm_weights_of_gemma_are_added_to_one_in_float32(golden_folder):
    """1 + 0.001 is 1 in bfloat16."""
    spec = hf.load(golden_folder("gemma2")).spec
    weight = {"final_norm": jnp.full(32, 0.001, jnp.bfloat16)}
    normed = decoder.norm(spec, weight, "final_norm", jnp.ones((1, 32), jnp.float32))
    np.testing.assert_allclose(normed, 1 + float(weight["final_norm"][0]), rtol=2e-6)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("qwen3", {"attention_bias": True}, ["attention_bias=True"]),
        ("qwen3", {"model_type": "qwen2_moe"}, ["'qwen2_moe'"]),
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
        ("qwen3_moe", {"use_sliding_window": True}, ["use_sliding_window=True"]),
        ("qwen3_moe", {"num_experts": 8}, ["num_local_experts 6 and num_experts 8", "one number of experts"]),
        ("qwen3_moe", {"num_experts_per_tok": 7}, ["num_experts_per_tok 7 of 6 experts"]),
        ("qwen3_moe", {"mlp_only_layers": [3]}, ["mlp_only_layers [3]"]),
        ("mixtral", {"num_local_experts": ...}, ["num_local_experts None"]),
        ("gpt_oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size None"]),
        ("gpt_oss_mxfp4", {"intermediate_size": 64}, ["gate_up_proj is [4, 32, 64] instead of [4, 32, 128]"]),
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
        ("llama3", {"experts": Experts(count=4, chosen=2, width=40)}),
        ("mixtral", {"experts": Experts(count=4, chosen=2, width=40)}),
        ("mixtral", {"experts": None}),
        ("gpt_oss", {"sinks": False}),
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


def test_longrope_s_frequencies_are_rounded_as_torch_s():
    """``1.0 / (factors * theta**exponents)`` of torch 2.13; rounded once, four of them differ."""
    short, long = tuple(1 + 0.1 * i for i in range(6)), tuple(1.5 + 1.5 * i for i in range(6))
    scaling = LongRope(short=short, long=long, original_max_position_embeddings=64, attention_factor=1.0)
    rope = Rope(theta=1e4, scaling=scaling, fraction=0.75)
    of_short = [1.0, 0.1958576887845993, 0.038679901510477066, 0.007692307699471712, 0.001538881566375494]
    of_long = [0.6666666865348816, 0.07181448489427567, 0.0103146405890584, 0.0016666667070239782]
    assert rope.at(64).frequencies(16).tolist() == [*of_short, 0.00030943931778892875]
    assert rope.at(65).frequencies(16).tolist() == [*of_long, 0.0002872579207178205, 5.157322084414773e-05]
    assert rope.frequencies(16).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_tokens_turn_as_each_of_them_alone(dtype):
    """Angles of many tokens are computed apart; those of one are not."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, 3, 16)), dtype)
    at, how = jnp.arange(48).reshape(2, 24) * 41, Rope(theta=1e4, fraction=0.5)
    together = jax.jit(rotate, static_argnames="rope")(x, at, rope=how)
    alone = [rotate(x[:, i : i + 1], at[:, i : i + 1], how) for i in range(24)]
    assert together.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(together, np.float32), np.asarray(jnp.concatenate(alone, axis=1), np.float32), atol=1e-6
    )
