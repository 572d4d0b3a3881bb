"""The sweep over thresholds: its points are those of the checks of training, its front is a front."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates_tiny import config_at, written

from kvjax import save_weights
from kvjax.policies.duo import Duo
from kvjax.policies.wg_kv import WriteGate
from kvjax.weights import WeightsError
from studies.wg_kv import gate_sweep
from train import gate_settings, gates


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


@pytest.fixture
def shipped(tmp_path, tiny_folder):
    """(config, model, folder of gates at two lambdas)."""
    config = written(tmp_path, config_at(tmp_path, tiny_folder))
    model = gate_settings.backbone(gate_settings.read(config))
    for name, seed, lam in (("weak", 1, 0.1), ("strong", 2, 0.5)):
        layers = WriteGate().example_weights(jax.random.key(seed), model.network)
        notes = {"lambda": lam, "window": 4}
        save_weights(tmp_path / f"gates/{name}.safetensors", model, WriteGate(), layers, notes=notes)
    alpha = [{"alpha": np.ones(2)}] * 2
    save_weights(tmp_path / "gates/duo.safetensors", model, Duo(), alpha, notes={"lambda": 1})
    return config, model, tmp_path / "gates"


def test_a_point_is_what_the_check_of_training_measures(shipped, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config, model, folder = shipped
    words = ["--config", str(config), "--gates", str(folder), "--out", str(tmp_path / "out")]
    assert gate_sweep.main([*words, "--length", "48", "--rows", "3", "--sinks", "0"]) == 0
    checked = json.loads((tmp_path / "out/tau.json").read_text())
    assert (tmp_path / "out/tau.png").stat().st_size > 5000
    points = checked["points"]
    assert [(p["gates"], p["tau"]) for p in points] == [
        (name, tau) for name in ("weak", "strong") for tau in gate_sweep.TAUS
    ]
    assert capsys.readouterr().out.count("\n") == len(points)
    for name in ("weak", "strong"):
        sizes = [p["cache"] for p in points if p["gates"] == name]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1] > 4 / 48
    # The same rows, all at once, by the walks of train.gates.
    settings = gate_settings.read(config)
    check = {"lengths": [48], "rows": 3}
    rows = gate_sweep.gate_rows.read_data(dataclasses.replace(settings, check=check), model.folder).check[48]
    layout = gates.make_layout(settings)
    net, frozen = gates.gated_model(settings, model.spec, layout), layout.frozen(model.params, "float32")
    layers = {"admission": gate_sweep.load_weights(folder / "weak.safetensors", model).layers}
    net = dataclasses.replace(net, sinks=0)
    want = gates._measure(net, 0.3, frozen, layers, jnp.asarray(rows))
    mine = next(p for p in points if p["gates"] == "weak" and p["tau"] == 0.3)
    assert mine["loss"] == pytest.approx(float(want["hard"]), rel=1e-4)
    assert mine["loss"] == pytest.approx(np.mean(mine["losses"]), rel=1e-5)
    _, z = gates._student(net, frozen, layers, jnp.asarray(rows), 0.3)
    kept = (np.asarray(jax.nn.sigmoid(z))[..., :-4] >= 0.3).mean()
    assert mine["cache"] == pytest.approx((4 + 44 * kept) / 48, rel=1e-5)
    assert mine["loss"] > 0


def test_sinks_pass_whatever_their_gate(shipped):
    config, model, folder = shipped
    rows = np.arange(48, dtype=np.int32)[None]
    settings = gate_settings.read(config)
    none, some, every = (gate_sweep.measured(settings, model, folder, rows, n) for n in (0, 4, 48))
    for point, more, most in zip(none, some, every):
        assert point["cache"] <= more["cache"] <= most["cache"] == 1
        assert most["loss"] == pytest.approx(0, abs=1e-6)
    strict = [(p, m) for p, m in zip(none, some) if p["tau"] == max(gate_sweep.TAUS)]
    assert all(m["cache"] > p["cache"] for p, m in strict)


def test_the_front_is_the_best_of_the_other_lambdas():
    def point(lam, cache, loss):
        return {"lambda": lam, "cache": cache, "loss": loss}

    points = [point(1, 0.2, 1.0), point(1, 0.4, 0.01), point(2, 0.3, 0.2), point(3, 0.1, 9.0)]
    assert gate_sweep.over_front(points, points[2]) == pytest.approx(2.0)  # log-linear: 0.1 half-way
    assert gate_sweep.over_front(points, points[3]) is None
    assert gate_sweep.over_front(points, points[0]) is None
    points += [point(3, 0.5, 0.01)]
    both = gate_sweep.over_front(points, points[2])
    assert both == pytest.approx(2.0)  # the curve of 3 is above the one of 1 there


def test_what_cannot_be_swept(shipped, tmp_path, capsys):
    config, model, folder = shipped
    (tmp_path / "none").mkdir()
    with pytest.raises(WeightsError, match="has no write gates"):
        gate_sweep.measured(
            gate_settings.read(config), model, tmp_path / "none", np.zeros((1, 48), np.int32), 4
        )
    words = ["--gates", str(folder), "--out", str(tmp_path / "out")]
    assert gate_sweep.main(["--config", str(tmp_path / "no.yaml"), *words]) == 2
    assert "cannot be read" in capsys.readouterr().err
