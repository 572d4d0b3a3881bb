"""φ maps on a tiny model: the objective by its formulas, the fold, learning, resume, export, bad input."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranker_tiny
import yaml
from ranker_tiny import generated_text  # noqa: F401

import kvjax
from kvjax.policies import phi
from kvjax.weights import read_weights
from train import loop, traces
from train.agents import make_layout
from train.phi import __main__ as command
from train.phi import batches, dropped, maps, objective, settings
from train.trace_file import Traces

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "traces": {
        "sequences": 10,
        "held": 3,
        "lengths": [48, 80],
        "shares": [1, 1],
        "shard": 4,
        "dtype": "float32",
        "data": {"kind": "rows", "mix": {"ruler": 1, "books": 1}},
    },
    "maps": {"features": 6, "hidden": 5},
    "target": {"prompts": [40], "sinks": 2, "tail": 4, "queries": 6, "reach": 8, "rows": 2, "retrieved": 0.1},
    "optimizer": {"peak": 0.02, "warmup": 2, "weight_decay": 0.0},
    "plan": {"steps": 24, "log_every": 1, "check_every": 12, "save_every": 4},
}
ROOT = Path(__file__).resolve().parents[2]
DROPS = "knorm + uniform(12) + recent(4)"


config_at = functools.partial(ranker_tiny.config_at, config=CONFIG)


def records(folder: Path) -> list[dict[str, Any]]:
    """A run's log without times."""
    lines = (folder / "run" / "40" / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in loop.CLOCK} for line in lines]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder) -> Path:
    """A folder with a config, its traces and a run."""
    home = tmp_path_factory.mktemp("phi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVJAX_DATA", "/nowhere")
        path = config_at(home, tiny_folder)
        assert traces.main(["--config", str(path)]) == 0
        assert command.main(["--config", str(path)]) == 0
    return home


# --- formulas ------------------------------------------------------------------------------------


def test_the_fold_is_the_papers_map():
    random = np.random.default_rng(0)
    raw = maps.initial(jax.random.key(0), 2, 3, 5, settings.Maps(features=4, width=7, hidden=6))
    raw = {n: x + 0.3 * random.standard_normal(x.shape).astype(np.float32) for n, x in raw.items()}
    layer = maps.folded(raw)
    for side, x in (("k", (2, 4, 5)), ("q", (6, 4, 5))):
        x = random.standard_normal(x).astype(np.float32)
        features = phi.log_features(layer, side, jnp.asarray(x)[None])[0]
        for head in range(len(x)):
            at = head if side == "k" else divmod(head, 3)
            p = {n[:-2]: np.asarray(v, np.float64)[at] for n, v in raw.items() if n.endswith(side)}
            g0 = x[head] @ p["ws"] + p["bs"]
            z = g0 @ p["w1"] + p["b1"]
            gelu = z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
            g1 = g0 + p["a"] * (gelu @ p["w2"] + p["b2"])
            np.testing.assert_allclose(features[head], g1 @ p["wo"] + p["bo"], atol=2e-4)


@pytest.mark.slow
def test_untrained_maps_are_right_in_the_mean():
    """Random features of exp(q k / sqrt(H)): many of them estimate it up to exp of half the squared norms."""
    drawn = maps.initial(jax.random.key(1), 1, 1, 4, settings.Maps(features=20_000, spread=1.0))
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 3, 4)).astype(np.float32)
    layer = maps.folded(drawn)
    log_q, log_k = (
        np.asarray(phi.log_features(layer, s, x), np.float64)[0, 0] for s, x in (("q", q), ("k", k))
    )
    scores = np.logaddexp.reduce(log_q[:, None] + log_k[None], axis=-1)
    norms = (q[0, 0] ** 2).sum(-1)[:, None] + (k[0, 0] ** 2).sum(-1)[None]
    np.testing.assert_allclose(scores, q[0, 0] @ k[0, 0].T / 2 + norms / 4, atol=0.15)


def test_the_terms_are_the_papers():
    random, loss = np.random.default_rng(0), settings.Loss(temperature=1.7, band=2.0, delta=0.5)
    s, guess = 2 * random.standard_normal((2, 4, 30))
    there = random.random((4, 30)) < 0.7
    there[3] = False
    terms = objective.distance(loss, jnp.asarray(s), jnp.asarray(guess), jnp.asarray(there))

    def huber(x: float) -> float:
        return x * x / 2 if abs(x) <= 0.5 else 0.5 * (abs(x) - 0.25)

    for i in range(3):
        r, g = s[i][there[i]] - s[i][there[i]].max(), guess[i][there[i]] - s[i][there[i]].max()
        log_p, log_g = (x / 1.7 - np.logaddexp.reduce(x / 1.7) for x in (r, g))
        kl = 1.7**2 * (np.exp(log_p) * (log_p - log_g)).sum()
        top = np.mean([huber(b - a) for a, b in zip(r, g) if a >= -2])
        far = np.mean([huber(max(b + 2, 0)) for a, b in zip(r, g) if a < -2])
        mass = huber(max(np.logaddexp.reduce(g) - np.logaddexp.reduce(r), 0))
        right = {"kl": kl, "top": top, "far": far, "mass": mass}
        right["all"] = 0.99 * kl + 0.01 * (top + 2 * far + 4 * mass)
        for name, value in right.items():
            np.testing.assert_allclose(terms[name][i], value, rtol=2e-4, atol=1e-6)
    assert all(float(value[3]) == 0 for value in terms.values())


def one_batch(made: Path, **sections: Any) -> tuple[objective.Task, dict[str, np.ndarray]]:
    chosen = settings.read(made / "config.yaml")
    traces = Traces.open(made / "traces")
    return (
        objective.Task(loss=chosen.loss, target=chosen.target, prompt=chosen.prompt),
        batches.batches(traces, chosen, made)[3],
    )


@pytest.mark.slow
def test_a_batch_asks_behind_the_prompt_for_its_middle(made):
    task, batch = one_batch(made)
    assert batch["k"].shape == (2, 4, 48, 8)
    assert batch["q"].shape == (2, 4, 2, 6, 8)
    assert ((batch["at"] >= 40) & (batch["at"] < 48)).all()
    assert np.flatnonzero(objective.summarised(task, batch)[0, 0]).tolist() == list(range(2, 36))
    again = one_batch(made)[1]
    assert all((batch[name] == again[name]).all() for name in batch)


@pytest.mark.slow
def test_students_scores_are_those_of_the_served_maps(made):
    _, batch = one_batch(made)
    raw = command.initial_maps(settings.read(made / "config.yaml"), Traces.open(made / "traces").manifest)
    scores = np.asarray(objective.student(maps.folded(raw), batch))
    layer = maps.folded(raw)
    log_k = np.asarray(phi.log_features(layer, "k", batch["k"]), np.float64)
    log_q = np.asarray(phi.log_features(layer, "q", batch["q"].reshape(2, 8, 6, 8)), np.float64)
    right = np.logaddexp.reduce(log_q.reshape(2, 4, 2, 6, 1, 6) + log_k[:, :, None, None], axis=-1)
    np.testing.assert_allclose(scores, right, atol=1e-3)


@pytest.mark.slow
def test_errors_are_those_of_a_softmax_over_what_is_read_and_what_is_guessed(made):
    task, batch = one_batch(made)
    raw = command.initial_maps(settings.read(made / "config.yaml"), Traces.open(made / "traces").manifest)
    x = objective.scored(task, maps.folded(raw), batch)
    alone, completed = objective.errors(x, batch["v"], (0, 3))
    row, head, group, query = 1, 2, 1, 4
    s, guess, seen, inside = (
        np.asarray(part, np.float64)[row, head, :, query] for part in (x.scores, x.guess, x.seen, x.inside)
    )
    best = np.argsort(-np.where(inside[0] > 0, s.max(axis=0), -np.inf))[:3]
    v = np.asarray(batch["v"], np.float64)[row, head]

    def output(weights: np.ndarray) -> np.ndarray:
        return weights @ v / weights.sum()

    full = output(np.exp(s[group]) * seen[group])
    for at, visited in ((0, []), (1, best)):
        left = inside[group] > 0
        left[visited] = False
        kept = np.exp(s[group]) * seen[group] * ~left
        for errors, weights in ((alone, kept), (completed, kept + np.exp(guess[group]) * left)):
            right = np.abs(output(weights) - full).sum() / np.abs(full).sum()
            assert float(errors[at, row, head, group, query]) == pytest.approx(right, rel=1e-4)


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_maps_learn(made):
    log = records(made)
    held = [line for line in log if "held_both" in line]
    assert log[-2]["all"] < 0.8 * log[0]["all"]
    assert held[-1]["held_completed"] < held[-1]["held_left_out"]
    assert held[-1]["held_both"] < held[-1]["held_selected"]


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_losses_it_would_have_had(made, tmp_path, tiny_folder):
    short = config_at(tmp_path, tiny_folder, plan={"seconds": 0.0})
    for _ in range(24):
        assert command.main(["--config", str(short), "--traces", str(made / "traces")]) == 0
        if records(tmp_path)[-1]["step"] >= 3:
            break
    whole = config_at(tmp_path, tiny_folder)
    assert command.main(["--config", str(whole), "--traces", str(made / "traces")]) == 0
    ours = {(line["step"], "held_both" in line): line for line in records(tmp_path)}
    theirs = {(line["step"], "held_both" in line): line for line in records(made)}
    assert ours == theirs


def test_what_is_exported_serves(made, tmp_path, tiny_folder):
    file = tmp_path / "maps.safetensors"
    assert command.main(["--config", str(made / "config.yaml"), "--export", str(file)]) == 0
    assert file.with_suffix(".jsonl").exists()
    notes = read_weights(file).notes
    assert (notes["prompt"], notes["for"], notes["temperature"]) == ("40", "the prompt's middle", "2.0")
    model = kvjax.load(tiny_folder)
    learned = kvjax.weights_for("topk(4) + phi(6)", model, file)
    assert float(learned["completion"][0]["length"][0]) == 40
    state, logits = kvjax.prefill(model, "topk(4) + phi(6)", [list(range(5, 45))], weights=learned)
    assert np.isfinite(np.asarray(logits)).all()
    assert int(state.layers[0].summary.count[0, 0]) == 40 - 16 - 4


def test_where_the_config_says_so_what_is_exported_is_silenced(made, tmp_path, tiny_folder):
    """One export is the other with --silence; but for that nothing differs."""
    plain, quiet = (made / "config.yaml", tmp_path / "quiet.yaml")
    tree = yaml.safe_load(plain.read_text()) | {"silence": {"sequences": 2, "retrieved": [0.1]}}
    quiet.write_text(yaml.safe_dump(tree))
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "two")]
    for config, file in zip((plain, quiet), files):
        assert command.main(["--config", str(config), "--export", str(file)]) == 0
    logs = [file.with_suffix(".jsonl").read_text().splitlines() for file in files]
    assert "silent" not in read_weights(files[0]).notes
    assert logs[0] == (made / "run" / "40" / "log.jsonl").read_text().splitlines()
    assert command.main(["--config", str(quiet), "--silence", str(files[0])]) == 0
    one, two = (read_weights(file) for file in files)
    assert one.notes == two.notes
    assert logs[1] == files[0].with_suffix(".jsonl").read_text().splitlines()
    for a, b in zip(one.layers, two.layers):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_what_a_policy_drops_has_maps_of_its_own(made, tmp_path, tiny_folder, capsys):
    few = {"steps": 4, "log_every": 1, "check_every": 4, "save_every": 4}
    path = config_at(tmp_path, tiny_folder, target={"policy": DROPS}, plan=few)
    assert command.main(["--config", str(path), "--traces", str(made / "traces")]) == 0
    chosen, traces = settings.read(path), Traces.open(made / "traces")
    folder = tmp_path / "run" / "40" / "dropped"
    batch = batches.batches(traces, chosen, folder)[1]
    gone = batch["dropped"]
    assert (gone[..., :40].sum(-1) == 28).all()  # a budget of 12
    assert not gone[..., 36:].any()
    index = batches.usable(traces, chosen)[0][0]
    model = kvjax.load(tiny_folder)
    state, _ = kvjax.prefill(model, DROPS, [traces.read(index, ("tokens",))["tokens"][:40]])
    there = np.asarray(kvjax.metrics.present(state))[:, 0, :, :40]
    np.testing.assert_array_equal(dropped.read(folder, index)[..., :40], ~there)
    other = config_at(tmp_path, tiny_folder, target={"policy": "knorm + uniform(8)"}, plan=few)
    assert command.main(["--config", str(other), "--traces", str(made / "traces")]) == 2
    assert "holds the verdicts of" in capsys.readouterr().err


def test_heads_divide_over_devices():
    with pytest.raises(settings.ConfigError, match="devices: 3 does not divide 4"):
        make_layout(3, 4)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"target": {"prompts": []}}, "target.prompts"),
        ({"target": {"prompts": [4]}}, "target.prompts"),
        ({"target": {"retrieved": 1.0}}, "target.retrieved"),
        ({"target": {"policy": "quest"}}, "drops no token"),
        ({"target": {"policy": "windw(8)"}}, "Did you mean 'window'"),
        ({"target": {"reach": 80}}, "traces.lengths of 120 or more"),
        ({"maps": {"features": 0}}, "maps.features"),
        ({"maps": {"deep": 3}}, "deep"),
        ({"loss": {"temperature": 0}}, "loss.temperature"),
        ({"loss": {"kl": 1.5}}, "loss.kl"),
        ({"target": {"prompts": [40, 64]}}, "--prompt 40"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_trained_is_refused(sections, words, made, tmp_path, tiny_folder, capsys):
    path = config_at(tmp_path, tiny_folder, **sections)
    assert command.main(["--config", str(path), "--traces", str(made / "traces")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nothing_is_exported_before_anything_is_trained(made, tmp_path, tiny_folder, capsys):
    path, file = config_at(tmp_path, tiny_folder), tmp_path / "maps.safetensors"
    words = ["--config", str(path), "--traces", str(made / "traces"), "--export", str(file)]
    assert command.main(words) == 2
    assert "Train first" in capsys.readouterr().err
    assert not file.exists()
    assert command.main(["--config", str(path), "--prompt", "99"]) == 2
    assert "--prompt 99 is none of target.prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "phi").glob("*.yaml")), ids=lambda file: file.stem
)
def test_the_configs_that_are_shipped_are_read(file):
    for prompt in yaml.safe_load(file.read_text())["target"]["prompts"]:
        read = settings.read(file, prompt)
        assert read.base.folder.name == str(prompt)
        assert read.tokens <= max(read.base.recording.lengths)
