"""Heads that φ does not help go without it: who they are, by NumPy, and what becomes of a file of maps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import kvjax
from kvjax.policies import phi
from kvjax.weights import read_weights, save_weights
from train import trace_rows
from train.phi import __main__ as command
from train.phi import maps, objective, settings, silence
from train.traces import describe, trace

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "traces": {
        "folder": "nowhere",
        "sequences": 2,
        "held": 3,
        "lengths": [44, 52],
        "shares": [1, 1],
        "dtype": "float32",
        "data": {"kind": "rows", "mix": {"ruler": 1}},
    },
    "maps": {"features": 6, "hidden": 5},
    "target": {"prompts": [40], "sinks": 2, "tail": 4, "queries": 6, "reach": 8},
    "silence": {"sequences": 3, "retrieved": [0.0, 0.1]},
    "plan": {"steps": 1},
}
LOUD = 1, 2
"""A layer and query head whose φ takes all mass, whatever is read."""


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


@pytest.fixture
def config(tmp_path, tiny_folder) -> Path:
    tree = CONFIG | {"folder": str(tmp_path / "run"), "model": {"source": str(tiny_folder)}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def file(config, tiny_folder) -> Path:
    """Untrained maps as they are exported, one head of them loud."""
    chosen, model = settings.read(config), kvjax.load(tiny_folder)
    raw = maps.initial(jax.random.key(0), 4, 2, 8, chosen.maps)
    layers = command.by_layer(raw, describe(chosen.base, model).layers, 40)
    bias = layers[LOUD[0]]["last_q"]
    layers[LOUD[0]] |= {"last_q": bias + 20.0 * (np.arange(4) == LOUD[1])[:, None]}
    path = config.parent / "maps.safetensors"
    save_weights(path, model, phi.Phi(6), layers, notes=command.identifying_notes(chosen) | {"step": 3})
    return path


def test_a_head_is_helped_whose_error_is_lower_at_every_count():
    # [count, place, row, layer, head]
    # helped; not with two tokens; not lower; only in the haystack; one bad row
    alone = np.full((2, 2, 3, 1, 5), 0.4)
    completed = np.full((2, 2, 3, 1, 5), 0.1)
    completed[1, :, :, 0, 1] = 0.5
    completed[0, :, :, 0, 2] = 0.4
    completed[:, 1, :, 0, 3] = 0.5
    completed[0, 1, 2, 0, 4] = 0.41
    seen = silence.HeadErrors((0, 2), alone, completed)
    assert silence.not_helped(seen).tolist() == [[False, True, True, True, True]]


@pytest.mark.slow
def test_silent_heads_leave_what_is_not_read_out_and_the_others_stay(config):
    """In the functions of training's checks and studies, scores of the size of 1e4 and no NaN."""
    chosen, random = settings.read(config), np.random.default_rng(0)
    task = objective.Task(loss=chosen.loss, target=chosen.target, prompt=40)
    batch = {n: random.standard_normal((1, 4, 48, 8)).astype(np.float32) for n in ("k", "v")}
    batch |= {"q": 1e4 * random.standard_normal((1, 4, 2, 6, 8)).astype(np.float32)}
    batch |= {"at": np.arange(42, 48, dtype=np.int32)[None]}
    raw = maps.initial(jax.random.key(0), 4, 2, 8, chosen.maps)
    layer = {name: np.asarray(x) for name, x in maps.folded(raw).items()}
    silent = np.arange(8) % 3 == 0
    (quiet,) = silence.silenced([layer], silent[None])
    assert np.isfinite(layer["last_q"]).all()
    assert all(quiet[n] is layer[n] for n in layer if n != "last_q")
    np.testing.assert_array_equal(quiet["last_q"][~silent], layer["last_q"][~silent])
    (alone, before), (same, after) = (
        np.reshape(objective.errors(objective.scored(task, p, batch), batch["v"], (0, 3)), (2, 2, 8, 6))
        for p in (layer, quiet)
    )
    np.testing.assert_array_equal(alone, same)
    np.testing.assert_array_equal(after[:, silent], alone[:, silent])
    np.testing.assert_array_equal(after[:, ~silent], before[:, ~silent])
    assert not np.array_equal(before[:, silent], alone[:, silent]), "φ changed nothing before"


def features(layer: dict, side: str, head: int, x: np.ndarray) -> np.ndarray:
    """log φ of x [T, H] by one head's map, from the formula."""
    p = {n[:-2]: np.asarray(w, np.float64)[head] for n, w in layer.items() if n.endswith(f"_{side}")}
    z = x @ p["in"] + p["inner"]
    return x @ p["line"] + z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2))) @ p["out"] + p["last"]


def by_numpy(layer: dict, head: int, batch: dict, wo: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    """A head's mean errors [2, C, 2] after ``wo`` [H, D]: without φ and with it, early and late queries."""
    q, k, v = (np.asarray(batch[n], np.float64) for n in ("q", "k", "v"))
    scores = np.einsum("gqh,th->gqt", q, k) * 8**-0.5
    log_k, log_q = features(layer, "k", head // 2, k), features(layer, "q", head, q[head % 2])
    guess = np.logaddexp.reduce(log_q[:, None] + log_k, axis=-1)
    middle = (np.arange(48) >= 2) & (np.arange(48) < 36)

    def output(w: np.ndarray) -> np.ndarray:
        return w @ v / w.sum()

    errors = np.zeros((2, len(counts), 2))
    for number, at in enumerate(batch["at"]):
        w = np.exp(scores[head % 2, number]) * (np.arange(48) <= at)
        best = np.argsort(-np.where(middle, scores[:, number].max(axis=0), -np.inf))
        for i, count in enumerate(counts):
            left = middle & ~np.isin(np.arange(48), best[:count])
            for one, unread in enumerate((0.0, np.exp(guess[number]))):
                off = (output(np.where(left, unread, w)) - output(w)) @ wo
                # 4 of the 8 tokens are the answer.
                errors[one, i, int(at >= 44)] += np.sqrt((off**2).sum()) / 4
    return errors


def test_the_command_silences_whom_numpy_finds_and_changes_nothing_else(config, file, tiny_folder, capsys):
    before, chosen = read_weights(file), settings.read(config)
    assert command.main(["--config", str(config), "--silence", str(file)]) == 0
    after = read_weights(file)
    counts = (0, 4)
    model = kvjax.load(tiny_folder)
    right = np.zeros((2, 2, 2, 3, 2, 4))
    for row, batch in enumerate(silence.sequences(chosen, model)):
        assert batch["at"].tolist() == [list(range(40, 48))]
        for layer, head in np.ndindex(2, 4):
            wo = np.asarray(model.params["layers"][layer]["wo"], np.float64)[:, head].T
            one = {n: batch[n][0, 2 * layer + head // 2] for n in ("q", "k", "v")}
            one |= {"at": batch["at"][0]}
            right[:, :, :, row, layer, head] = by_numpy(before.layers[layer], head, one, wo, counts)
    means, worst = right.mean(axis=3), right.max(axis=3)
    silent = ~((means[1] < means[0]) & (worst[1] <= worst[0])).all(axis=(0, 1))
    assert silent[LOUD]
    assert not silent.all(), "nothing is left to compare"
    said = json.loads(file.with_suffix(".jsonl").read_text())
    assert said["counts"] == list(counts)
    assert said["silent"] == np.argwhere(silent).tolist()
    for at, name in enumerate(("alone", "completed")):
        np.testing.assert_allclose(said["by_head"][name], means[at], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(said["by_head"][f"{name}_worst"], worst[at], rtol=1e-3, atol=1e-5)
        together = np.sqrt((means[at] ** 2).sum(axis=(2, 3)))
        np.testing.assert_allclose(said["after_wo"][name], together, rtol=1e-3, atol=1e-5)
    assert after.notes["silent"] == " ".join(f"{layer}.{head}" for layer, head in np.argwhere(silent))
    assert after.notes.items() >= before.notes.items()
    for layer in range(2):
        for name, value in before.layers[layer].items():
            want = np.array(value)
            if name == "last_q":
                want[silent[layer]] = -np.inf
            np.testing.assert_array_equal(after.layers[layer][name], want)
    assert command.main(["--config", str(config), "--silence", str(file)]) == 2
    assert "are silenced already" in capsys.readouterr().err


def test_heads_are_judged_on_no_sequence_of_the_traces(config, tiny_folder, monkeypatch):
    chosen, model, seen = settings.read(config), kvjax.load(tiny_folder), []
    real = silence.trace
    monkeypatch.setattr(silence, "trace", lambda m, a, tokens: seen.append(tokens) or real(m, a, tokens))
    assert len(list(silence.sequences(chosen, model))) == 3
    drawn = trace_rows.sequences(chosen.base, model.text)
    stored = {tuple(drawn.draw(i)[1][:48]) for i in range(5)}
    assert {len(one) for one in seen} == {48}
    assert len(stored | {tuple(one) for one in seen}) == len(stored) + 3


def test_samples_are_summarised_and_asked_as_they_are_served(config):
    """The context without its ends is in the summary; the queries are those that write the answer."""
    tree = yaml.safe_load(config.read_text())
    tree["silence"] |= {"sequences": 4, "tasks": ["vt"]}
    tree["traces"] |= {"lengths": [708], "shares": [1]}
    tree["target"] |= {"prompts": [700], "queries": 8}
    chosen, model = settings.parse(tree), kvjax.load()  # the tiny model spells words in too many tokens
    (sample,) = silence.samples(chosen, model)
    row = silence._served(chosen, model, describe(chosen.base, model), sample)
    context, asked = len(sample.context), len(sample.context + sample.question + sample.prefix)
    assert row["dropped"].shape == (24, 708)
    np.testing.assert_array_equal(np.flatnonzero(row["dropped"][5]), np.arange(2, context - 4))
    right = np.arange(asked - 1, asked - 1 + len(sample.answer))
    np.testing.assert_array_equal(row["at"], np.resize(right, 8))
    assert row["places"].all()
    ids = np.asarray([*sample.context, *sample.question])
    alone = trace(model, describe(chosen.base, model), ids)["k"].reshape(24, len(ids), 64)
    np.testing.assert_allclose(row["k"][:, : len(ids)], alone, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("silence", {"tasks": ["no-such"]}, "silence.tasks"),
        ("silence", {"sequences": 0}, "silence.sequences"),
        ("silence", {"retrieved": []}, "silence.retrieved"),
        ("silence", {"retrieved": [1.0]}, "silence.retrieved"),
        ("silence", {"loud": 1}, "loud"),
        ("silence", None, "no section silence"),
        ("maps", {"features": 6, "symmetric": True}, "maps.symmetric"),
        ("target", {"prompts": [36], "reach": 8}, "its maps are for"),
        ("target", {"prompts": [40], "reach": 80}, "Give one of 120 or more"),
    ],
    ids=str,
)
def test_what_cannot_be_silenced_is_refused(name, change, words, config, file, capsys):
    tree = yaml.safe_load(config.read_text()) | {name: change}
    config.write_text(yaml.safe_dump(tree))
    content = file.read_bytes()
    assert command.main(["--config", str(config), "--silence", str(file)]) == 2
    assert words in capsys.readouterr().err
    assert file.read_bytes() == content
