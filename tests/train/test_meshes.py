"""Training in two processes has the losses of one, resumes on another mesh, and moves no whole table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import compiler
import numpy as np
import pytest
from gates_tiny import config_at, records, written

from train import config, loop
from train import traces as tracing
from train.config import ConfigError
from train.embedded import pretrain

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TOGETHER = ["-m", "kvjax.launch", "--local", "2", "--devices"]


def ran(*words: str, devices: int = 0) -> str:
    """Standard error of a program in this process' way, or in two processes of so many devices."""
    command = [sys.executable, *([*TOGETHER, str(devices), "--"] if devices else []), *words]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    settings = {"KVJAX_DATA": "/nowhere", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    environment = os.environ | compiler.short_way() | settings
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def close(many: list[dict], one: list[dict], rtol: float = 2e-4) -> None:
    assert [record["step"] for record in many] == [record["step"] for record in one]
    for actual, wanted in zip(many, one, strict=True):
        assert actual.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(actual[name], wanted[name], rtol=rtol, atol=1e-6, err_msg=name)


def log(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in loop.CLOCK} for line in lines]


@pytest.mark.slow
def test_gates_of_two_processes_go_on_on_one_device(tmp_path, tiny_folder):
    one, two = tmp_path / "one", tmp_path / "two"
    ran("-m", "train.gates", "--config", str(written(one, config_at(one, tiny_folder))))
    parts = {"mesh": {"data": 2, "tensor": 2}, "plan": {"seconds": 0}}
    begun = written(two, config_at(two, tiny_folder, **parts))
    for step in (1, 2):  # the clock ends each leg after a step
        ran("-m", "train.gates", "--config", str(begun), devices=2)
        assert [record["step"] for record in records(two) if "loss" in record] == list(range(1, step + 1))
    ran("-m", "train.gates", "--config", str(written(two, config_at(two, tiny_folder))))
    close(records(two), records(one))


@pytest.mark.slow
def test_pretraining_of_two_processes_goes_on_on_other_meshes(tmp_path):
    program = str(HERE / "mesh_pretrain.py")
    ran(program, str(tmp_path / "one"), "1", "1", "4")
    for mesh, devices in (("2 2", 2), ("4 1", 2), ("1 1", 0)):
        leg = [] if mesh == "1 1" else ["0"]
        ran(program, str(tmp_path / "many"), *mesh.split(), "4", *leg, devices=devices)
    close(log(tmp_path / "many"), log(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["ranker", "phi"])
def test_agents_of_two_processes_have_the_losses_of_one(tmp_path, tiny_folder, monkeypatch, learner):
    import ranker_tiny
    import test_train_phi

    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    made = {"ranker": ranker_tiny, "phi": test_train_phi}[learner].config_at
    losses = {}
    for devices in (1, 4):
        folder = tmp_path / str(devices)
        path = made(folder, tiny_folder, devices=devices, plan={"steps": 4, "check_every": 2})
        traces = folder / "traces"
        if devices == 1:
            assert tracing.main(["--config", str(path)]) == 0
        else:
            traces.symlink_to(tmp_path / "1" / "traces")
        ran("-m", f"train.{learner}", "--config", str(path), devices=2 if devices > 1 else 0)
        [written_log] = folder.rglob("log.jsonl")
        losses[devices] = log(written_log.parent)
    close(losses[4], losses[1], rtol=1e-3)


WARNING = "Involuntary full rematerialization"


@pytest.mark.slow
def test_no_shipped_config_makes_the_partitioner_move_a_whole_table():
    names = ["control", *map(str, sorted(ROOT.glob("configs/gates/*.yaml"))), "configs/pretrain/base.yaml"]
    names = [name for name in names if "duo" not in name and "smollm2" not in name]  # a model of the hub
    said = ran(str(HERE / "mesh_compile.py"), "4", "2", *names)
    parts = dict(part.split("\n", 1) for part in said.split("# ")[1:])
    assert parts.keys() == set(names)
    assert WARNING in parts.pop("control")
    assert not [name for name, text in parts.items() if WARNING in text]


# --- refused -------------------------------------------------------------------------------------


def pretraining(**changes) -> dict:
    level = {"lengths": [64, 128]}
    model = {"num_kv_heads": 2, "dtype": "float32"}
    return {"model": model, "mix": {"tokens": 512, "levels": [level]}} | changes


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"fsdp": 2}, r"mesh: \{'fsdp': 2\} in the config has no such axis. .* over data, heads over tensor"),
        ({"data": 0}, "mesh.data: 0 in the config is out of range. Give a whole number, 1 or more"),
        ("data=2", "mesh: 'data=2' in the config names no axes. Write {data: 2, tensor: 4}"),
    ],
)
def test_axes_that_are_none_are_refused(mesh, said):
    with pytest.raises(ConfigError, match=said):
        config.axes(mesh)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": {"data": 8}}, "mesh.data: 8 in the config does not divide batches of 4 rows of 128"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor: 4 in the config does not divide the 2 KV heads"),
        ({"mesh": {"data": 2}, "devices": 2}, "devices replicate them. Give one of the two"),
        ({"mesh": {"data": 2}, "loss": {"products": "float32"}}, "Give devices instead"),
        ({"mesh": {"data": 4, "tensor": 2}}, r"mesh: \{data: 4, tensor: 2\} needs 8 devices"),
    ],
)
def test_a_mesh_that_pretraining_cannot_use_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        pretrain.make_layout(pretraining(**changes))


def test_one_device_is_no_mesh():
    assert pretrain.make_layout(pretraining()) is None
    assert pretrain.make_layout(pretraining(mesh={"data": 1, "tensor": 1})) is None
