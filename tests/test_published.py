"""Published KVzap and Fast KVzip weights, as the authors' code writes them; others are refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.weights import WeightsError, read_weights
from kvjax.weights.__main__ import main
from kvjax.weights.published import fast_kvzip_layers
from kvjax.weights.torch_file import TorchFileError, read_saved, read_tensors

GOLDEN = Path(__file__).parent / "golden"
ZAP, MODEL = GOLDEN / "zap", str(GOLDEN / "llama3")


def convert(file: Path, out: Path, model: str = MODEL) -> int:
    return main(["convert", str(file), "--model", model, "--out", str(out)])


@pytest.mark.parametrize(
    ("file", "policies", "says"),
    [
        ("kvzap-mlp.safetensors", ("kvzap(-5)", "kvzap-ada"), "--policy kvzap --weights kvzap="),
        ("kvzap-linear.safetensors", ("kvzap(-5, prefill=True)",), "--policy kvzap --weights kvzap="),
        (
            "fast-kvzip.pt",
            ("fast-kvzip", "fast_kvzip_gate(0.2)"),
            "--policy fast-kvzip --weights fast_kvzip=",
        ),
    ],
)
def test_one_file_serves_admission_and_eviction(file, policies, says, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert convert(ZAP / file, out) == 0
    assert says in capsys.readouterr().err
    assert read_weights(out).notes["source"] == file
    for policy in policies:
        weights = kvjax.weights_for(policy, kvjax.load(MODEL), out)
        assert len(next(iter(weights.values()))) == 2


def test_bfloat16_is_read(tmp_path):
    tensors = load_file(ZAP / "kvzap-linear.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}, file)
    assert convert(file, tmp_path / "out.safetensors") == 0
    layers = read_weights(tmp_path / "out.safetensors").layers
    np.testing.assert_array_equal(
        layers[1]["w2"], tensors["layers.1.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_files_home_may_be_that_of_what_it_learns(tmp_path):
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    out = folder / "weights" / "kvzap" / "default.safetensors"
    assert convert(ZAP / "kvzap-mlp.safetensors", out, str(folder)) == 0
    model = kvjax.load(folder)
    for policy in ("kvzap", "kvzap-ada"):
        assert kvjax.weights_for(policy, model)


def test_arrays_beside_tensors_are_not_read():
    with pytest.raises(TorchFileError, match=r"names numpy\S+, which is not part of a plain tensor"):
        read_tensors(ZAP / "fast-kvzip.pt")
    saved = read_saved(ZAP / "fast-kvzip.pt", beside=True)
    assert saved.keys() == {"module", "loss", "acc", "loss_train", "acc_train"}
    assert type(saved["loss"]).__name__ == "Unread"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers.2.weight": (2, 32), "layers.2.bias": (2,)}, "holds 3 layers, the model has 2"),
        ({"layers.1.weight": (2, 33)}, r"layer 1 have shapes \{'w2': \(2, 33\)|shapes .*'w2': \(2, 33\)"),
        ({"layers.1.weight": (4, 32)}, r"2 KV heads of 16 channels needs"),
        ({"norm.weight": (32,)}, "holds 'norm.weight', which no published KVzap model has"),
    ],
)
def test_kvzap_of_another_model_is_refused(changes, says, tmp_path, capsys):
    tensors = load_file(ZAP / "kvzap-linear.safetensors")
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in changes.items()}
    file, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, file)
    assert convert(file, out) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(says, error)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda layers: layers[:1], "holds 1 layers, the model has 2"),
        (lambda layers: {"0": layers[0]}, "'module' that is not a list of layers"),
        (lambda layers: [{**layers[0], "b": np.zeros((3, 1, 2))}, layers[1]], r"has b of shape \(3, 1, 2\)"),
        (
            lambda layers: [{n: x for n, x in layers[0].items() if n != "k_base"}, layers[1]],
            "gate with sinks",
        ),
        (
            lambda layers: [
                x | {f"{n}_proj.weight": np.zeros((m, 33)) for n, m in (("q", 32), ("k", 16))} for x in layers
            ],
            r"does not fit\. .*needs \{'w_q': \(2, 2, 8, 32\)",
        ),
    ],
)
def test_fast_kvzip_of_another_model_is_refused(change, says):
    saved = read_saved(ZAP / "fast-kvzip.pt", beside=True)["module"]
    with pytest.raises(WeightsError, match=says):
        fast_kvzip_layers(change(saved), kvjax.load(MODEL).network, "file.pt")
