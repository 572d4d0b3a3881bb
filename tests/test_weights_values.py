"""Weights for one model in other values: known by its signs; and files of half the size."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.loading import embedded_folder
from kvjax.models.decoder import Decoder, shapes
from kvjax.models.layout import INPUTS_FIRST
from kvjax.models.spec import ModelSpec, Rope
from kvjax.saving import StateError
from kvjax.serve.__main__ import main
from kvjax.weights import WeightsError, find, fingerprint, load_weights, read_weights
from train import gates, mesh
from train.gate_settings import parse

POLICY = kvjax.policy("write_gate(0.5, window=8) + sinks(2)")
SPEC = ModelSpec(
    family="llama",
    vocab_size=256,
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    model_dim=144,
    mlp_dim=384,
    max_positions=256,
    rope=Rope(theta=1e5),
    tied=True,
)
"""SmolLM2-135M with everything smaller."""


def model(params: dict) -> tiny.Tiny:
    return tiny.Tiny(network=Decoder(SPEC), params=params)


@pytest.fixture(scope="module")
def made() -> tiny.Tiny:
    """A model of random weights."""
    random = np.random.default_rng(0)
    sizes, tree = jax.tree.flatten(shapes(SPEC), is_leaf=lambda x: isinstance(x, tuple))
    return model(tree.unflatten([jnp.asarray(random.standard_normal(x), jnp.float32) for x in sizes]))


@pytest.fixture(scope="module")
def file(made, tmp_path_factory) -> Path:
    """Gates for it."""
    path = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    layers = POLICY.admission.example_weights(jax.random.key(0), made.network)
    kvjax.save_weights(path, made, POLICY.admission, layers)
    return path


def noisy(x: jnp.ndarray) -> jnp.ndarray:
    """Half a step of Q4_1 either way: blocks of 32 numbers have 15 steps from the least to the greatest."""
    if x.ndim < 2:
        return x
    blocks = np.asarray(x).reshape(-1, 32)
    step = (blocks.max(axis=1) - blocks.min(axis=1))[:, None] / 15
    random = np.random.default_rng(1)
    return jnp.asarray((blocks + step * random.uniform(-0.5, 0.5, blocks.shape)).reshape(x.shape), x.dtype)


def inputs_first(of):
    """The matrices, laid as signs are counted."""
    leaves = jax.tree_util.tree_leaves_with_path(of.params)
    axes = {path: INPUTS_FIRST.get(path[-1].key, range(leaf.ndim)) for path, leaf in leaves}
    return [np.asarray(leaf).transpose(axes[path]) for path, leaf in leaves if leaf.ndim > 1]


def taken(other, source):
    return kvjax.weights_for(POLICY, other, {"write_gate": source, "values": "other"})


def test_the_same_model_in_other_values_is_taken_and_the_share_of_signs_is_named(made, file):
    other = model(jax.tree.map(noisy, made.params))
    assert fingerprint(other) != fingerprint(made)
    with pytest.raises(WeightsError, match="whose weights differ from those of this model"):
        kvjax.weights_for(POLICY, other, file)
    with pytest.warns(UserWarning, match=r"in other values; 9\d\.\d % of the signs") as said:
        weights = taken(other, file)
    assert len(said) == 1
    jax.tree.map(np.testing.assert_array_equal, weights["admission"], read_weights(file).layers)
    learned = load_weights(file, other, other_values=True)
    signs = [
        (np.sign(a.ravel()[at]) == np.sign(b.ravel()[at]))
        for a, b in zip(inputs_first(made), inputs_first(other), strict=True)
        for at in [np.arange(256) * 2654435761 % a.size]
    ]
    assert learned.agreement == pytest.approx(np.mean(signs), abs=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken(made, file)  # the same values: nothing to say


def permuted(x: jnp.ndarray) -> jnp.ndarray:
    return x[np.random.default_rng(2).permutation(len(x))] if x.ndim > 1 else x


def drawn_anew(x: jnp.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), x.dtype)


@pytest.mark.parametrize("change", [permuted, drawn_anew])
def test_another_model_of_the_same_shape_is_refused(made, file, change):
    other = model(jax.tree.map(change, made.params))
    with pytest.raises(WeightsError, match=r"[45]\d\.\d % of the signs sampled .*; 90 % is the least"):
        taken(other, file)


def test_a_file_without_signs_behaves_as_before_and_cannot_be_taken_for_other_values(made, file, tmp_path):
    notes = {name: x for name, x in read_weights(file).notes.items() if name not in ("signs", "architecture")}
    old = tmp_path / "old.safetensors"
    save_file(load_file(file), old, metadata=notes)
    other = model(jax.tree.map(noisy, made.params))
    assert kvjax.weights_for(POLICY, made, old).keys() == taken(made, old).keys() == {"admission"}
    with pytest.raises(WeightsError, match="whose weights differ from those of this model"):
        kvjax.weights_for(POLICY, other, old)
    with pytest.raises(WeightsError, match="holds no signs of this model"):
        taken(other, old)


def test_another_architecture_is_refused_before_signs_are_looked_at(made, file):
    other = model(made.params | {"extra": jnp.zeros(3)})
    with pytest.raises(WeightsError, match=r" 0\.0 % of the signs"):
        taken(other, file)


def test_values_says_other_or_nothing(made, file):
    with pytest.raises(WeightsError, match="values='same' says nothing. Write values=other"):
        kvjax.weights_for(POLICY, made, {"write_gate": file, "values": "same"})
    assert find(kvjax.policy("full"), made, {"values": "other"}).weights == {}


def test_the_command_line_takes_values_too(tmp_path, tiny_folder, capsys):
    base = kvjax.load(tiny_folder)
    path, folder = tmp_path / "gates.safetensors", tmp_path / "other"
    layers = POLICY.admission.example_weights(jax.random.key(0), base.network)
    kvjax.save_weights(path, base, POLICY.admission, layers)
    shutil.copytree(tiny_folder, folder)
    stored = load_file(folder / "model.safetensors")
    moved = {name: np.where(np.abs(x) < 0.02 * x.std(), -x, x) for name, x in stored.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    words = ["--model", str(folder), "--prompt", "Hello there", "--max-new-tokens", "1"]
    words += ["--policy", repr(POLICY)]
    assert main([*words, "--weights", f"write_gate={path}"]) == 2
    assert "whose weights differ" in capsys.readouterr().err
    assert main([*words, "--weights", f"write_gate={path},values=other"]) == 0
    assert f"was made for {Path(base.name).name} in other values; 9" in capsys.readouterr().err


def test_a_saved_context_stays_bound_to_exact_values(made, file, tmp_path):
    other, full = model(jax.tree.map(noisy, made.params)), kvjax.policy("full")
    state, _ = kvjax.prefill(made, full, [[1, 2, 3]], context=64)
    kvjax.save(state, tmp_path / "state", model=made, policy=full)
    with pytest.raises(StateError, match="state of another model"):
        kvjax.open(tmp_path / "state", model=other, policy=full)


# --- float16 -------------------------------------------------------------------------------------


def test_float16_is_stored_and_float32_is_read(made, file, tmp_path):
    layers, half = read_weights(file).layers, tmp_path / "half.safetensors"
    kvjax.save_weights(half, made, POLICY.admission, layers, dtype="float16")
    assert {x.dtype for x in load_file(half).values() if x.size >= 16} == {np.dtype(np.float16)}
    assert half.stat().st_size < 0.6 * file.stat().st_size
    back = kvjax.weights_for(POLICY, made, half)["admission"]
    for layer, right in zip(back, layers, strict=True):
        assert {x.dtype for x in layer.values()} == {jnp.dtype("float32")}
        for name in right:
            np.testing.assert_allclose(layer[name], right[name], rtol=1e-3, atol=1e-6)
    large = [layer | {"w1": layer["w1"] + 1e6} for layer in layers]
    with pytest.raises(WeightsError, match=r"admission.0.w1 has numbers that are too large for float16"):
        kvjax.save_weights(half, made, POLICY.admission, large, dtype="float16")


def test_rounding_shipped_gates_moves_the_held_out_loss_by_less_than_a_thousandth(tmp_path):
    backbone = kvjax.load()
    shipped = embedded_folder() / "weights/write_gate/default.safetensors"
    window = int(read_weights(shipped).notes["window"])
    half = tmp_path / "half.safetensors"
    part = dataclasses.replace(POLICY.admission, window=window)
    kvjax.save_weights(half, backbone, part, read_weights(shipped).layers, dtype="float16")
    settings = parse(
        {
            "name": "rounded",
            "seed": 0,
            "folder": str(tmp_path),
            "model": {"source": "embedded"},
            "gate": {"window": window, "norm": True},
            "loss": {"cost": "window", "lambdas": {"default": 0.3}},
            "data": {"kind": "rows", "tokens": 256, "lengths": [256], "shares": [1]},
            "plan": {"steps": 1},
            "check": {"lengths": [256], "rows": 1},
        }
    )
    net = gates.gated_model(settings, backbone.spec, mesh.layout(1, 1))
    frozen = mesh.stacked(backbone.params, "float32")
    text = "The house by the river had been empty for years when they came to look at it. " * 16
    tokens = np.asarray([backbone.text.encode(text)[:256]], np.int32)
    losses = [
        float(
            gates.objective(
                net, settings.lam, settings.cost, frozen, {"admission": load_weights(x, backbone).layers},
                {"tokens": tokens},
            )[0]
        )
        for x in (shipped, half)
    ]  # fmt: skip
    assert losses[0] > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0]
