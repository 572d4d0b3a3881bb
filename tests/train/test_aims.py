"""What the embedded model must show, measured on tiny models: each figure against a plain count."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from test_recipe import tiny

from kvjax.models import decoder, hf
from train import rows
from train.embedded import aims, card, checks, confidence, pretrain, retrieval
from train.embedded import heads as kinds_of_heads
from train.embedded.setup import initial, setup


@pytest.fixture(scope="module")
def have(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", "/nowhere")
    config = tiny(tmp_path_factory.mktemp("aims"))
    config["model"]["max_positions"] = 512
    yield setup(config)
    patch.undo()


@pytest.fixture(scope="module")
def params(have):
    return initial(have.spec, 0, 0.05, "many")


def test_copies_and_continued_words():
    #                  0  1  2  3  4  5  6  7  8  9
    row = np.array([1, 5, 6, 7, 8, 9, 5, 6, 7, 8])
    begins = np.isin(np.arange(10), [5, 7])
    kinds = confidence.kinds(row, begins)
    #  8 after 5 6 7 was met at 4; 7 at 8 follows 9 5 6, which is new
    assert kinds.tolist() == ["other", "word", "other", "word", "word", "other", "word", "other", "copy"]


def test_calibration_error_of_known_cells():
    best = np.array([0.95, 0.95, 0.95, 0.95, 0.35, 0.35])
    right = np.array([1, 1, 1, 0, 0, 0], bool)
    np.testing.assert_allclose(confidence.calibration_error(best, right), (4 * 0.2 + 2 * 0.35) / 6)


def test_autocorrelation_of_runs_and_of_noise():
    runs = np.tile(np.repeat([0.0, 1.0], 8), (3, 20))
    np.testing.assert_allclose(confidence.autocorrelation(runs, 1), 1 - 2 * (39 / 319), atol=0.01)
    noise = np.random.default_rng(0).random((4, 4000))
    assert abs(confidence.autocorrelation(noise, 1)) < 0.03


def test_what_lies_ahead_leaves_the_step_itself_out():
    gain = np.array([[1.0, 2.0, 4.0, 8.0]])
    np.testing.assert_allclose(confidence.ahead(gain, 1), [[2, 4, 8]])
    np.testing.assert_allclose(confidence.ahead(gain, 2), [[3, 6]])


def test_schedules_give_few_slots_to_equally_many_steps():
    c = np.array([[0.9, 0.1, 0.8, 0.2, 0.5]])
    tight, loose = np.array([[0, 10.0, 20, 30, 40]]), np.zeros((1, 5))
    slots = confidence.schedules(c, tight, loose, 0.7)  # each step decides for the next one
    assert slots == {"tight_when_sure": 10.0, "tight_when_least_sure": 15.0, "tight_at_random": 12.5}


@pytest.mark.slow
def test_a_window_that_holds_everything_changes_nothing(have, params):
    row = jnp.asarray(rows.text_row(np.random.default_rng(0), have.held, 96)[0])
    whole, wide, narrow = (confidence.read(have.spec, params, row, w) for w in (None, 101, 32))
    for a, b in zip(whole, wide):
        np.testing.assert_allclose(a, b, atol=1e-4)
    np.testing.assert_allclose(narrow[0][:31], whole[0][:31], atol=1e-4)
    assert np.abs(np.asarray(narrow[0] - whole[0])[40:]).max() > 1e-3
    logits = decoder.dense_logits(have.spec, params, row[None])[0]
    want = -np.asarray(jax.nn.log_softmax(logits))[np.arange(95), np.asarray(row[1:])]
    np.testing.assert_allclose(whole[0], want, atol=1e-3)


def test_where_an_answer_is_copied_from(have):
    count = 0
    for seed in range(6):
        drawn = checks.CHECKS["four_keys"](np.random.default_rng(seed), have.held, 320)
        if drawn is None:
            continue
        wanted = retrieval.copied_from(*drawn)
        queries = np.flatnonzero(wanted >= 0)
        count += len(queries)
        assert (drawn[0][wanted[queries]] == drawn[0][queries + 1]).all()
        assert (wanted[queries] < queries - 3).all()
        second = retrieval._offset(wanted, 1)
        if len(queries) > 1:
            assert np.flatnonzero(second >= 0).tolist() == [queries[0]]
            assert drawn[0][second[queries[0]]] == drawn[0][queries[0] + 2]
    assert count


@pytest.mark.slow
def test_heads_against_the_constructed_start(have, params, monkeypatch):
    monkeypatch.setattr(retrieval, "LENGTH", 384)
    monkeypatch.setattr(retrieval, "BEGIN", 128)
    got = retrieval.measure(have.spec, params, have.held, count=4)
    assert np.shape(got["sentence"]) == np.shape(got["fact"]) == (4, 4)
    assert np.shape(got["value"]) == (4, 4, 4)
    assert {tuple(x) for x in got["retrieving"]} <= {(i, k) for i in (1, 2, 3) for k in (0, 1)}
    assert len(got["retrieving"]) >= 3
    entropy = np.asarray(got["entropy"])
    assert entropy.shape == (4, 8)
    assert 0 <= entropy.min() < entropy.max() <= 1 + 1e-5
    # A head with no preference is as wide as can be.
    flat = params | {"layers": [p | {"wq": 0 * p["wq"], "bq": 0 * p["bq"]} for p in params["layers"]]}
    np.testing.assert_allclose(
        retrieval.measure(have.spec, flat, have.held, count=4)["entropy"], 1, atol=1e-4
    )


def test_silencing_asks_a_model_without_those_heads(have, params):
    asked_of = []

    def ask(lame):
        asked_of.append(
            [(i, k) for i in range(4) for k in range(4) if not np.any(lame["layers"][i]["wo"][:, 2 * k])]
        )
        return {"needles": float(len(asked_of[-1]))}

    got = retrieval.silence(have.spec, params, [(1, 0), (1, 1), (3, 0)], ask)
    assert got["nothing"] == {"needles": 0.0}
    assert asked_of[1:17] == [[(i, k)] for i in range(4) for k in range(4)]
    assert asked_of[17:] == [[(1, 0), (1, 1)], [(3, 0)]]
    assert sorted(got["layers"]) == ["1", "3"]


@pytest.mark.slow
def test_the_command_writes_every_aim(have, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retrieval, "LENGTH", 256)
    monkeypatch.setattr(retrieval, "BEGIN", 128)
    monkeypatch.setattr(kinds_of_heads, "LENGTH", 256)
    # The tiny vocabulary has no word of its own, and the stand-in's held-out words are all of several tokens.
    monkeypatch.setattr(aims, "vocabulary_source", lambda have: have.held)
    monkeypatch.setattr(checks, "VALUES", {"five digits": checks.Value("number", 5)})
    config = copy.deepcopy(have.config)
    model = tmp_path / "model"
    drawn = initial(have.spec, 0, 0.05, "many", ahead=3)
    kept = {name: leaf for name, leaf in drawn.items() if name != "ahead"}
    hf.save(model, have.spec, kept, tokenizer=Path(config["tokenizer"]), dtype="bfloat16")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    file = tmp_path / "out.json"
    words = f"aims --config {path} --model {model} --count 2 --lengths 512 --write {file}"
    monkeypatch.setattr(sys, "argv", words.split())
    aims.main()
    table = json.loads(file.read_text())
    assert set(table["aims"]) == set(aims.AIMS)
    for row in table["aims"].values():
        assert set(row) == {"is", "aim", "met"}
    assert len(table["wordings"]["untrained"]) == len(table["wordings"]["trained"]) == 10
    assert set(table["recall"]) == set(checks.CHECKS)
    assert set(table["values"]) == set(checks.VALUES)
    assert "MISSED" in capsys.readouterr().out
    assert pretrain.AHEAD_SHARE > 0

    # Some of it anew: the rest stays, and each part knows how many rows it had.
    again = f"{words} --parts bits_per_byte values".replace("--count 2", "--count 3")
    monkeypatch.setattr(sys, "argv", again.split())
    aims.main()
    changed = json.loads(file.read_text())
    assert {name for name, n in changed["n"].items() if n == 3} == {"bits_per_byte", "values"}
    assert all(changed[name] == table[name] for name in aims.PARTS if changed["n"][name] == 2)
    monkeypatch.setattr(sys, "argv", again.replace(str(file), str(tmp_path / "none.json")).split())
    with pytest.raises(SystemExit, match="2"):
        aims.main()
    assert "--parts measures some of a table anew" in capsys.readouterr().err

    # And the card shows each of them, whatever it came to.
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"step": s, "level": 0, "loss": 2.0, "text_nll": 1.0}) + "\n" for s in (10, 20))
        + json.dumps({"step": 20, "level": 0, "bits_per_byte": 2.0, "sentence": 0.5})
        + "\n"
    )
    path.write_text(yaml.safe_dump(config | {"card": {"limits": ["None is known."]}}))
    words = f"card --config {path} --aims {file} --log {tmp_path / 'log.jsonl'} --out {model}"
    monkeypatch.setattr(sys, "argv", words.split())
    pytest.importorskip("matplotlib")
    card.main()
    text = (model / "README.md").read_text()
    assert set(card.SAYS) == set(aims.AIMS)
    missed = sum(not row["met"] for row in table["aims"].values())
    assert text.count("**missed**") == missed > 0
    assert all(said in text for said in card.SAYS.values())
    assert (model / "heads.png").exists()
    assert (model / "curves.png").exists()
