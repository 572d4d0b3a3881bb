"""The rankers that ship with the embedded model: theirs, found by name, better than what learns nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import kvjax
from kvjax.weights import fingerprint, load_weights
from studies.kvp import costs
from train import traces
from train.ranker import settings
from train.trace_file import Traces

FOLDER = Path(kvjax.__file__).parent / "assets" / "embedded"
NAMES = ("default", "ruler", "text")


@pytest.fixture(scope="module")
def model():
    return kvjax.load(FOLDER)


def test_they_are_this_models_and_found_by_name(model):
    files = {name: FOLDER / f"weights/kvp/{name}.safetensors" for name in NAMES}
    for name, file in files.items():
        assert file.stat().st_size < 5e6
        assert load_weights(file, model).notes["fingerprint"] == fingerprint(model)
        assert file.with_suffix(".jsonl").exists()
        assert file.with_suffix(".png").exists()
        layers = kvjax.weights_for("kvp", model, name)["eviction"]
        assert len(layers) == model.spec.num_layers
        np.testing.assert_array_equal(layers[0]["w_out"], load_weights(file, model).layers[0]["w_out"])
    usual = kvjax.weights_for("kvp", model)["eviction"]
    np.testing.assert_array_equal(usual[0]["w_out"], load_weights(files["default"], model).layers[0]["w_out"])


@pytest.mark.slow
def test_they_rank_better_than_what_learns_nothing(model, tmp_path, monkeypatch):
    """On three held-out rows over text that they were not trained on: that of the generator."""
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    tree = {
        "name": "shipped",
        "seed": 0,
        "folder": str(tmp_path / "run"),
        "model": {"source": str(FOLDER)},
        "traces": {
            "folder": str(tmp_path / "traces"),
            "sequences": 1,
            "held": 3,
            "lengths": [384],
            "shares": [1],
            "data": {"kind": "rows", "mix": {"ruler": 1, "facts": 1, "books": 1}},
        },
        "plan": {"steps": 1},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert traces.main(["--config", str(config)]) == 0
    read = kvjax.weights_for("kvp", model)["eviction"]
    report = costs.measured(
        Traces.open(tmp_path / "traces"), settings.read(config), {"default": costs.stacked(read)}
    )
    area = {name: float(x.mean()) for name, x in report.areas.items()}
    assert area["default"] < min(area[name] for name in costs.FREE), area
    assert area["default"] > area["oracle"]
