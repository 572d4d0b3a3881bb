"""Gates and rankers of an NNX module of anybody's, trained by the commands that train them for ours."""

from __future__ import annotations

import gates_tiny
import numpy as np
import own_model
import pytest
import ranker_tiny
from ranker_tiny import generated_text  # noqa: F401

import kvjax
from train import gates, traces
from train.ranker import __main__ as ranker

PLAN = {"steps": 8, "log_every": 1, "check_every": 8, "save_every": 8}


def source(tiny_folder) -> dict[str, str]:
    return {"source": "python:own_model:of_bytes", "tokenizer": str(tiny_folder), "dtype": "float32"}


def serves(spec: str, weights) -> None:
    """The trained weights are those of the module, and drop tokens."""
    model, policy = kvjax.load(own_model.of_bytes()), kvjax.policy(spec)
    prompt = np.random.default_rng(1).integers(0, 250, 60).tolist()
    found = kvjax.weights_for(policy, model, weights)
    run = kvjax.generate(model, policy, [prompt], max_new_tokens=2, weights=found)
    assert len(run.tokens[0]) == 2
    assert run.state.layers[0].pages is not None


def test_gates_learn_and_serve(tmp_path, tiny_folder):
    tree = gates_tiny.config_at(tmp_path, tiny_folder, plan={**PLAN, "steps": 12})
    config = gates_tiny.written(tmp_path, tree | {"model": source(tiny_folder)})
    assert gates.main(["--config", str(config)]) == 0
    losses = [r["loss"] for r in gates_tiny.records(tmp_path) if "loss" in r]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    file = tmp_path / "gates.safetensors"
    assert gates.main(["--config", str(config), "--export", str(file)]) == 0
    serves("write_gate(0.5, window=4)", file)


@pytest.mark.slow  # the seam is that of gates
def test_rankers_learn_and_serve(tmp_path, tiny_folder):
    config = str(ranker_tiny.config_at(tmp_path, tiny_folder, model=source(tiny_folder), plan=PLAN))
    assert traces.main(["--config", config]) == 0
    assert ranker.main(["--config", config]) == 0
    file = tmp_path / "ranker.safetensors"
    assert ranker.main(["--config", config, "--export", str(file)]) == 0
    serves("kvp(2, recent=6) + uniform(24)", file)


def test_a_function_that_is_not_there_is_one_sentence(tmp_path, tiny_folder, capsys):
    model = {"source": "python:own_model:nothing", "dtype": "float32"}
    tree = gates_tiny.config_at(tmp_path, tiny_folder) | {"model": model}
    assert gates.main(["--config", str(gates_tiny.written(tmp_path, tree))]) == 2
    says = capsys.readouterr().err
    assert says.startswith("error: model.source: 'python:own_model:nothing'")
    assert says.count("\n") == 1
