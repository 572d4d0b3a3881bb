"""Weights of 8 and 4 bits against a NumPy oracle, through files, caches, meshes and command lines."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiler import compiled_in_full, written
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import decode
from kvjax.models import decoder, experts, hf, quantised
from kvjax.models.hf_files import open_folder
from kvjax.models.spec import Experts, ModelSpec
from kvjax.weights import fingerprint

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=331,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    model_dim=96,
    mlp_dim=192,
    max_positions=128,
    qk_norm=True,
    tied=False,
)
MOE = dataclasses.replace(
    SPEC, family="qwen3_moe", mlp_dim=160, experts=Experts(count=4, chosen=2, width=160)
)
EXPERT = 160 * 96
"""Entries of an expert's matrix; no other array has so many, or a multiple."""
PROMPTS = [[5, 9, 300, 17, 4, 88, 21], [40, 2, 11]]


def widened(weight) -> np.ndarray:
    """What codes and scales stand for, entry by entry."""
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales).astype(np.float64)
    out = np.zeros(weight.shape)
    if codes.dtype == np.int8:
        return codes * scales
    group = weight.group
    for at in np.ndindex(*weight.shape):
        *outer, i = at
        byte = codes[(*outer, i // group * (group // 2) + i % group % (group // 2))]
        nibble = byte >> 4 if i % group >= group // 2 else byte & 15
        out[at] = (int(nibble) - 8) * scales[(*outer, i // group)]
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(SPEC, tmp_path_factory.mktemp("q") / "model")


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    return saved(MOE, tmp_path_factory.mktemp("q") / "experts")


def saved(spec, place):
    draw = np.random.default_rng(0)
    leaf = lambda shape: draw.normal(size=shape).astype(np.float32) * shape[-1] ** -0.5  # noqa: E731
    params = jax.tree.map(leaf, decoder.shapes(spec), is_leaf=lambda x: isinstance(x, tuple))
    hf.save(place, spec, params, dtype="bfloat16")
    return place


@pytest.mark.parametrize("name", ["wq", "wo", "w_down", "embed"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_values_are_at_most_half_a_step_from_the_file_s(name, weight_dtype):
    shape = decoder.shapes(SPEC).get(name) or decoder.shapes(SPEC)["layers"][0][name]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    weight = quantised.quantised(x, name, weight_dtype, "float32")
    error = np.abs(widened(weight) - x)
    if weight.group:
        assert weight.codes.nbytes == x.size // 2
        grouped = x.reshape(*x.shape[:-1], -1, weight.group)
        # The largest value has a code; one of the other sign may lie half a step beyond the last code.
        step = np.abs(grouped).max(-1, keepdims=True) / 8
        assert (error.reshape(grouped.shape) <= step * 1.001).all()
        assert np.sqrt((error**2).mean()) < 0.1
    else:
        rows = x.reshape(*x.shape[: -quantised.INPUTS[name]], -1)
        step = np.abs(rows).max(-1, keepdims=True) / 127
        assert (error.reshape(rows.shape) <= step * 0.501).all()
    like = quantised.shapes(shape, name, weight_dtype, "float32")
    assert (like.codes.shape, like.scales.shape) == (weight.codes.shape, weight.scales.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_products_are_those_of_the_widened_weight(dtype, weight_dtype, tokens, monkeypatch):
    """Tiles of 10 outputs: the last of 192 begins in the one before it."""
    monkeypatch.setattr(quantised, "TILE", 960)
    draw = np.random.default_rng(2)
    weight = quantised.quantised(draw.normal(size=(192, 96)).astype(np.float32), "w_up", weight_dtype, dtype)
    x = jnp.asarray(draw.normal(size=(2, tokens, 96)), dtype)
    y = jax.jit(quantised.times)(x, jax.tree.map(jnp.asarray, weight))
    wanted = np.asarray(x).astype(np.float64) @ widened(weight).T
    # Of several tokens int4 weights are rounded to the dtype, as unquantised ones are.
    few = 2e-2 if (dtype, tokens, weight_dtype) == ("bfloat16", 3, "int4") else 1e-4
    np.testing.assert_allclose(y, wanted, atol=few * np.abs(wanted).max())


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_one_token_at_a_time_equals_the_whole_prompt(folder, weight_dtype):
    model = kvjax.load(folder, "float32", weight_dtype=weight_dtype)
    state, logits = kvjax.prefill(model, "full", PROMPTS, context=32)
    for row, prompt in enumerate(PROMPTS):
        whole = decoder.dense_logits(SPEC, model.params, np.asarray([prompt]))
        np.testing.assert_allclose(logits[row], whole[0, -1], atol=2e-5)
    new = np.asarray([7, 12])
    _, logits = decode.step(
        model.network, kvjax.policy("full"), model.params, {}, state, new, np.ones(2, bool)
    )
    for row, prompt in enumerate(PROMPTS):
        whole = decoder.dense_logits(SPEC, model.params, np.asarray([[*prompt, new[row]]]))
        np.testing.assert_allclose(logits[row], whole[0, -1], atol=2e-5)


def test_int8_is_close_to_the_file_and_int4_less_so(folder):
    tokens = np.random.default_rng(3).integers(0, 331, (2, 32))
    logits = [
        decoder.dense_logits(SPEC, kvjax.load(folder, "float32", weight_dtype=name).params, tokens)
        for name in (None, "int8", "int4")
    ]
    spread = np.std(logits[0])
    eight, four = (np.sqrt(np.mean((x - logits[0]) ** 2)) / spread for x in logits[1:])
    assert eight < 0.03 < four < 0.25


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_a_step_writes_no_widened_weight(folder, weight_dtype, monkeypatch):
    """A tile is smaller than the smallest weight; nothing of a weight's size is written."""
    monkeypatch.setattr(quantised, "TILE", 1024)
    model = kvjax.load(folder, "bfloat16", weight_dtype=weight_dtype)
    smallest = model.params["layers"][0]["wk"].size
    large = [line for _, size, line in arrays_of_a_step(model) if size >= smallest // 2]
    assert not large, large


@pytest.mark.parametrize("weight_dtype", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_step_writes_no_widened_expert_and_copies_none(of_experts, weight_dtype, monkeypatch):
    monkeypatch.setattr(quantised, "TILE", 1024)
    model = kvjax.load(of_experts, "bfloat16", weight_dtype=weight_dtype)
    assert isinstance(model.params["layers"][1]["experts_down"], quantised.Quantised)
    large = [line for _, size, line in arrays_of_a_step(model) if size >= EXPERT // 2]
    assert not large, large


def arrays_of_a_step(model):
    """What a compiled step of one row writes."""
    policy = kvjax.policy("full")
    state = decode.empty(model.network, policy, rows=1, context=32, dtype=jnp.bfloat16)
    token, active = np.zeros(1, np.int32), np.ones(1, bool)
    lowered = decode.step_program.lower(model.network, policy, model.params, {}, state, token, active)
    arrays = list(written(compiled_in_full(lowered).as_text()))
    assert arrays
    return [array for array in arrays if not re.search(r" (while|conditional)\(", array[2])]


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (2, 40)])
def test_tokens_go_through_quantised_experts(of_experts, weight_dtype, rows, length, monkeypatch):
    """As through experts of the values that the codes stand for; also in groups, as on a chip."""
    monkeypatch.setattr(quantised, "TILE", 1024)
    layer = kvjax.load(of_experts, "float32", weight_dtype=weight_dtype).params["layers"][1]
    plain = {name: widened(x) for name, x in layer.items() if isinstance(x, quantised.Quantised)}
    x = np.random.default_rng(rows).normal(size=(rows, length, 96))
    scores, wanted = x @ np.asarray(layer["router"], np.float64).T, np.zeros_like(x)
    for at in np.ndindex(rows, length):
        best = np.argsort(-scores[at])[:2]
        weight = np.exp(scores[at][best])
        for expert, share in zip(best, weight / weight.sum()):
            gate, up = (plain[f"experts_{name}"][expert] @ x[at] for name in ("gate", "up"))
            wanted[at] += share * (plain["experts_down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    made = jax.jit(decoder.mlp, static_argnums=0)(MOE, layer, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    monkeypatch.setattr(experts, "_in_turns", experts._in_groups)
    in_groups = jax.jit(lambda layer, x: decoder.mlp(MOE, layer, x))(layer, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(in_groups, wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_quantised_experts_lie_on_two_devices(of_experts, weight_dtype, on_two_devices):
    about = on_two_devices(of_experts, "full", weight_dtype)
    for leaf in ("codes", "scales"):
        for name in ("experts_gate", "experts_up", "experts_down"):
            whole, cut = about["shapes"][f"['{name}'].{leaf}"]
            assert cut == [2, *whole[1:]]
    assert len(set(about["fingerprints"])) == 1
    assert about["said"]["one"] == about["said"]["two"] == about["said"]["moved"]
    assert about["apart"] < 1e-4
    assert about["floats"], "no array was looked at"
    assert not [size for size in about["floats"] if size % EXPERT == 0]


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_the_fingerprint_of_experts_is_that_of_the_file(of_experts, weight_dtype):
    assert fingerprint(kvjax.load(of_experts, weight_dtype=weight_dtype)) == fingerprint(
        kvjax.load(of_experts)
    )


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_the_fingerprint_is_that_of_the_file(folder, weight_dtype):
    order = [[1, 0], [0, 1]]
    plain, turned = kvjax.load(folder), kvjax.load(folder, heads=order)
    model = kvjax.load(folder, weight_dtype=weight_dtype)
    assert fingerprint(model) == fingerprint(plain)
    reordered = kvjax.load(folder, weight_dtype=weight_dtype, heads=order)
    assert reordered.origin == fingerprint(plain)
    assert fingerprint(reordered) == fingerprint(turned) != fingerprint(plain)
    tokens = np.asarray([PROMPTS[0]])
    np.testing.assert_allclose(
        decoder.dense_logits(SPEC, reordered.params, tokens),
        decoder.dense_logits(SPEC, model.params, tokens),
        atol=1e-1,
    )


def test_a_saved_state_opens_beside_quantised_weights(folder, tmp_path):
    float_model = kvjax.load(folder, "float32")
    state, _ = kvjax.prefill(float_model, "full", PROMPTS, context=32)
    kvjax.save(state, tmp_path / "state", model=float_model, policy="full")
    saved = kvjax.open(tmp_path / "state", model=kvjax.load(folder, "float32", weight_dtype="int8"))
    np.testing.assert_array_equal(saved.state.length, state.length)


@pytest.mark.parametrize("weight_dtype", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_scales_are_cut_with_their_channels(folder, weight_dtype, on_two_devices):
    about = on_two_devices(folder, "full", weight_dtype)
    cut = lambda name, axis: [one[axis] // two[axis] for one, two in [about["shapes"][name]]][0]  # noqa: E731
    for leaf in ("codes", "scales"):
        for name in ("wq", "wk", "wv", "w_gate", "w_up"):
            assert cut(f"['{name}'].{leaf}", 0) == 2
        for name in ("wo", "w_down"):
            assert cut(f"['{name}'].{leaf}", 1) == (1 if (leaf, weight_dtype) == ("scales", "int8") else 2)
    assert len(set(about["fingerprints"])) == 1
    assert about["said"]["one"] == about["said"]["two"] == about["said"]["moved"]
    assert about["apart"] < 1e-4


# --- checkpoints that are quantised already ------------------------------------------------------

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.fixture
def fp8(folder, tmp_path):
    """The same model as its makers would publish it in FP8, and what its matrices stand for."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        x = tensor.astype(np.float32)
        scales = np.zeros([-(-n // 128) for n in x.shape], np.float32)
        for i, j in np.ndindex(*scales.shape):
            cut = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = np.abs(x[cut]).max() / 448
            tensors[name] = tensors[name].copy()
            x[cut] /= scales[i, j]
        codes = x.astype(ml_dtypes.float8_e4m3fn)
        for i, j in np.ndindex(*scales.shape):
            cut = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            x[cut] = codes[cut].astype(np.float32) * scales[i, j]
        tensors[name], tensors[f"{name}_scale_inv"], values[name] = codes, scales, x
    place = tmp_path / "fp8"
    place.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    half = dict(list(tensors.items())[::2])
    rest = {name: x for name, x in tensors.items() if name not in half}  # scales apart from their codes
    names = {}
    for number, shard in enumerate((half, rest)):
        save_file(shard, place / f"model-{number}.safetensors", metadata={"format": "pt"})
        names |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place, values


def test_fp8_checkpoints_are_widened_by_their_blocks_scales(fp8):
    place, values = fp8
    model = kvjax.load(place, "float32")
    names = {
        "wq": "self_attn.q_proj",
        "wo": "self_attn.o_proj",
        "w_up": "mlp.up_proj",
        "w_down": "mlp.down_proj",
    }
    for index, block in enumerate(model.params["layers"]):
        for ours, theirs in names.items():
            wanted = values[f"model.layers.{index}.{theirs}.weight"]
            np.testing.assert_array_equal(np.asarray(block[ours]).reshape(wanted.shape), wanted)


def test_a_part_of_an_fp8_matrix_is_widened_alone(fp8):
    place, values = fp8
    name, spec = "model.layers.0.mlp.down_proj.weight", hf.read_spec(place)[0]
    files = open_folder(place, spec, (128, 128))
    file = next(file for file in files if name in file.names)
    cut = slice(30, 60), slice(120, 150)
    np.testing.assert_array_equal(file.slices(name)[cut], values[name][cut])


def test_what_is_quantised_already_is_not_quantised_again(fp8):
    with pytest.raises(
        hf.ModelError, match=r"weight_dtype='int8'\) would quantise weights that are FP8 already"
    ):
        kvjax.load(fp8[0], weight_dtype="int8")


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quantised by 'gptq', which kvjax does not read. Take a GGUF file",
        ),
        ({"quant_method": "awq"}, "unquantised checkpoint with --weight-dtype int4"),
        (FP8 | {"weight_block_size": None}, "weight_block_size None"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_quantisations_are_refused(fp8, about, says):
    file = fp8[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
    with pytest.raises(hf.ModelError, match=says):
        kvjax.load(fp8[0])


def test_scales_of_other_blocks_are_named(fp8):
    file = fp8[0] / "config.json"
    about = {"quantization_config": FP8 | {"weight_block_size": [64, 128]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | about))
    with pytest.raises(hf.ModelError, match=r"weight_scale_inv is F32 \[2, 1\]; it must be \[3, 1\]"):
        kvjax.load(fp8[0])


def test_weights_of_no_known_kind_are_refused(folder):
    with pytest.raises(
        hf.ModelError, match=r"weight_dtype='int5'\) names no such weights. Give one of int8, int4"
    ):
        kvjax.load(folder, weight_dtype="int5")


def test_quantised_weights_are_neither_saved_nor_trained(folder, tmp_path):
    model = kvjax.load(folder, weight_dtype="int8")
    with pytest.raises(hf.ModelError, match="quantised"):
        hf.save(tmp_path / "copy", model.spec, model.params)
    assert not (tmp_path / "copy").exists()
    from train.mesh import stacked

    with pytest.raises(kvjax.UserError, match="Load the model without weight_dtype"):
        stacked(model.params, "float32")


def test_groups_divide_rows():
    assert [quantised.group_of(n) for n in (4096, 896, 96, 80, 90, 50, 16)] == [32, 32, 32, 40, 90, 50, None]
