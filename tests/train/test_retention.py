"""Retention gates on a tiny model: attention under them, the loss, a run and its file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates_tiny import config_at, records, written

from kvjax import load, weights_for
from kvjax.policies import trim_kv
from kvjax.types import Heads
from train import distill, gates, mesh, retention

MORE = {"capacity": 24, "bias": 4.0}


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


def settings_at(folder, model, **sections):
    return retention.read(written(folder, config_at(folder, model, **sections) | MORE))


def test_scores_are_multiplied_by_what_is_left():
    random = np.random.default_rng(0)
    b, t, n, k, h, d = 2, 9, 4, 2, 3, 5
    shapes = (b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, d)
    q, keys, v, hidden = (np.float32(random.standard_normal(shape)) for shape in shapes)
    x = Heads(q=q, k=keys, v=v, q_pre=q, k_pre=keys, hidden=jnp.asarray(hidden))
    leaves = trim_kv.initial(jax.random.key(1), d, k, 1, hidden=6, bias=1.0)[0]
    out, retained = retention.retained_attention(leaves, x)
    beta = np.exp(np.asarray(trim_kv.log_retention(leaves, x.hidden), np.float64))
    for row, at, head in np.ndindex(b, t, n):
        left = beta[row, head // 2, : at + 1] ** (at - np.arange(at + 1))
        s = left * (keys[row, : at + 1, head // 2] @ q[row, at, head]) / np.sqrt(h)
        p = np.exp(s) / np.exp(s).sum()
        np.testing.assert_allclose(out[row, at, head], p @ v[row, : at + 1, head // 2], atol=1e-5)
        np.testing.assert_allclose(retained[row, head // 2, at], left.sum(), rtol=1e-5)


def test_the_loss_is_divergence_and_excess(tmp_path, tiny_folder):
    settings, model = settings_at(tmp_path, tiny_folder), load(tiny_folder)
    net = gates.gated_model(settings, model.spec, mesh.layout(1, 1))
    frozen = mesh.stacked(model.params, "float32")
    tokens = np.random.default_rng(1).integers(0, 250, (2, 40)).astype(np.int32)
    params = retention.initial_gates(settings, model)
    loss, parts = retention.objective(net, 0.5, 24, frozen, params, {"tokens": tokens})
    np.testing.assert_allclose(loss, parts["divergence"] + 0.5 * parts["excess"], rtol=1e-6)
    assert float(parts["divergence"]) > 0
    stacked = distill.stack_layers(params["eviction"])
    _, retained = distill.forward(net, frozen, stacked, tokens, retention.retained_attention)
    over = np.maximum(np.asarray(retained) - 24, 0).mean() / 16
    np.testing.assert_allclose(parts["excess"], over, rtol=1e-5)
    kept = jax.tree.map(lambda x: x, params)
    for layer in kept["eviction"]:
        layer["b2"] = jnp.full_like(layer["b2"], 60.0)
        layer["w2"] = jnp.zeros_like(layer["w2"])
    _, parts = retention.objective(net, 0.5, 24, frozen, kept, {"tokens": tokens})
    np.testing.assert_allclose(parts["divergence"], 0, atol=1e-6)  # nothing is forgotten: the model itself
    np.testing.assert_allclose(parts["retained"], 40, rtol=1e-5)


def test_a_run_learns_and_its_file_serves(tmp_path, tiny_folder, capsys):
    rate = {"peak": 0.05, "weight_decay": 0.0}
    config = config_at(tmp_path, tiny_folder, optimizer=rate, plan={"steps": 6, "check_every": 6}) | MORE
    path = written(tmp_path, config)
    assert retention.main(["--config", str(path)]) == 0
    log = [record for record in records(tmp_path, "") if "loss" in record]
    assert log[-1]["excess"] < log[0]["excess"]
    file = tmp_path / "trim.safetensors"
    assert retention.main(["--config", str(path), "--export", str(file)]) == 0
    layers = weights_for("trim_kv + uniform(8)", load(tiny_folder), file)["eviction"]
    assert {name: x.shape for name, x in layers[0].items()}["w2"] == (2, 8)
    capsys.readouterr()


def test_a_capacity_that_no_row_exceeds_is_refused(tmp_path, tiny_folder, capsys):
    path = written(tmp_path, config_at(tmp_path, tiny_folder) | {"capacity": 64})
    assert retention.main(["--config", str(path)]) == 2
    assert "nothing would be forgotten" in capsys.readouterr().err
