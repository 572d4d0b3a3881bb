"""The φ maps that the embedded model ships: its own, and attention comes nearer to the full one with them."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eval import tasks
from kvjax.eval.measure import runner
from kvjax.eval.tasks.data import Data
from kvjax.weights import fingerprint, load_weights, read_weights
from train.phi.objective import Task, errors, scored
from train.phi.settings import Loss, Target
from train.trace_file import Manifest
from train.traces import trace

FOLDER = Path(kvjax.__file__).parent / "assets" / "embedded"
FILES = sorted((FOLDER / "weights" / "phi").glob("*.safetensors"))
PROMPT, ASKED = 384, 32


@pytest.fixture(scope="module")
def model():
    return kvjax.load(FOLDER, dtype="float32")


@pytest.fixture(scope="module")
def batch(model):
    """A prompt of generated text with a needle, and the queries behind it."""
    (_, sample), *_ = runner.draw(
        tasks.tasks()["niah_single_3"], model, Data(None), length=PROMPT + ASKED + 64, seed=9, count=1
    )
    tokens = np.asarray(sample.context + sample.question, np.int32)[: PROMPT + ASKED]
    spec = model.spec
    about = Manifest(
        model="embedded", fingerprint="", parameters=0, layers=spec.num_layers, heads=spec.num_heads,
        kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, softcap=None, dtype="float32", keys=("post",),
        queries=None, shard=1, lengths=(len(tokens),), train=1, seed=0, data={},
    )  # fmt: skip
    arrays, heads = trace(model, about, tokens), spec.num_layers * spec.num_kv_heads
    rows = {n: arrays[n].reshape(1, heads, -1, spec.head_dim) for n in ("k", "v")}
    q = arrays["q"][:, :, PROMPT:].reshape(1, heads, spec.groups, -1, spec.head_dim)
    return rows | {"q": q, "at": np.arange(PROMPT, len(tokens), dtype=np.int32)[None]}


def test_there_is_a_set_for_each_length_and_one_for_what_is_dropped():
    assert [file.stem for file in FILES] == ["default", "dropped", "prompt-2048", "prompt-512"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_maps_bring_attention_nearer(file, model, batch):
    loaded = load_weights(file, model)
    assert loaded.notes["fingerprint"] == fingerprint(model)
    assert kvjax.weights_for("topk(4) + phi(64)", model, file.stem).keys() == {"completion"}
    maps = {n: jnp.concatenate([layer[n] for layer in loaded.layers]) for n in loaded.layers[0]}
    task = Task(loss=Loss(), target=Target(prompts=(PROMPT,)), prompt=PROMPT)
    alone, completed = errors(scored(task, maps, batch), batch["v"], (0,))
    # Nothing of the middle is read: what stands for it must be better than leaving it out, by more where the
    # prompt is not five times shorter than those of the training.
    limit = 1.0 if file.stem == "prompt-2048" else 0.8
    assert float(completed.mean()) < limit * float(alone.mean())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_card_and_header_name_the_heads_without_φ(file):
    loaded = read_weights(file)
    silent = [np.isneginf(np.asarray(layer["last_q"])).all(axis=-1) for layer in loaded.layers]
    names = " ".join(f"{layer}.{head}" for layer, head in np.argwhere(silent))
    assert loaded.notes.get("silent", "") == names
    assert all(np.isfinite(x).all() for layer in loaded.layers for n, x in layer.items() if n != "last_q")
    rows = [
        line for line in (file.parent / "README.md").read_text().splitlines() if f"| `{file.stem}` |" in line
    ]
    assert any(f"| {names.count('.')}: {names} |" in row for row in rows) == bool(names)
