"""The command from end to end on a tiny random model: rows, resuming, pairing, learned weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from eval_rows import LENGTH, POLICIES, SAMPLES, words

from kvjax.catalogue import describe
from kvjax.catalogue import policy as parse
from kvjax.eval import tasks
from kvjax.eval.__main__ import main
from kvjax.eval.measure import grid, runner, store
from kvjax.eval.report import table
from kvjax.eval.tasks.data import Data
from kvjax.loading import load
from kvjax.weights import save_weights

pytestmark = pytest.mark.usefixtures("no_pack")


def lines(folder: Path) -> list[bytes]:
    return (folder / store.RESULTS).read_bytes().split(b"\n")[:-1]


def test_a_row_says_everything(finished):
    rows = store.read(finished)
    cells = [(row.cell.policy, row.cell.protocol) for row in rows]
    window, snap = POLICIES
    assert cells == [("full", "either"), (window, "either"), (snap, "agnostic"), (snap, "aware")]
    for row in rows:
        assert row.policy == describe(parse(row.cell.policy))
        for name in ("score", "nll", "kept_fraction", "peak_fraction", "mean_fraction", "reads_per_step"):
            assert isinstance(getattr(row, name), float), name
        assert row.data == "generated"
        assert row.full.nll == rows[0].nll
        assert row.informative is False  # random weights find nothing
        assert set(row.versions) == {"kvjax", "jax", "python"}
        assert len(row.each.nll) == SAMPLES
        assert np.shape(row.heads) == (2, 2)
    assert [row.switches.compress_at for row in rows] == ["never", "write", "context", "prompt"]
    assert [row.switches.prefill_attention for row in rows] == ["full", "policy", "full", "full"]


def test_what_is_kept_is_measured(finished, tiny_folder):
    full, window, agnostic, aware = store.read(finished)
    assert full.kept_fraction == full.span_retention == 1
    tokens = [len(full.example.pieces)]
    assert agnostic.span_retention < 1
    # Everything at once, a quarter of it: the prefix comes after in aware, the question too in agnostic.
    assert 0.24 < aware.kept_fraction < agnostic.kept_fraction < 0.6
    assert 0.35 < window.kept_fraction < 0.5
    # A window holds the newest 160 tokens and no other, in every layer and head alike; the prompt's last
    # token is not in yet when the answer begins.
    model = load(tiny_folder)
    drawn = runner.draw(tasks.tasks()["niah"], model, Data(None), length=LENGTH, seed=0, count=SAMPLES)
    for (_, encoded), retention in zip(drawn, window.each.retention):
        seen = len(encoded.context) + len(encoded.question) + len(encoded.prefix) - 1
        assert retention == pytest.approx((np.flatnonzero(encoded.needed) >= seen - 160).mean(), abs=1e-5)
    held = dict(zip(window.each.tags["depth_from_end"], window.each.retention))
    assert held[90] == 0 < held[10]
    assert sum(window.example.held) / 4 == 160
    assert max(full.example.held) == 4
    assert tokens[0] < len(full.example.held) < LENGTH
    for row in (window, agnostic, aware):
        assert row.bytes.live / row.bytes.full == pytest.approx(row.kept_fraction, abs=0.06)
        assert row.bytes.live <= row.bytes.allocated


def test_policies_see_the_same_samples(finished):
    rows = store.read(finished)
    assert all(row.each.tokens == rows[0].each.tokens for row in rows)
    assert all(row.each.tags == rows[0].each.tags != {} for row in rows)
    # Equal likelihoods where nothing was lost: the window holds the whole of no sample, so none may be equal.
    assert not set(rows[0].each.nll) & set(rows[1].each.nll)


def test_a_killed_run_goes_on_and_ends_in_the_same_file(finished, tiny_folder, tmp_path, monkeypatch):
    whole = (finished / store.RESULTS).read_bytes()
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    torn = b"\n".join([*lines(finished)[:2], lines(finished)[2][:200]])
    (out / store.RESULTS).write_bytes(torn)
    measured = []
    real = runner._measured
    monkeypatch.setattr(runner, "_measured", lambda cell, *rest: measured.append(cell) or real(cell, *rest))
    assert main(words(tiny_folder, out)) == 0
    assert (out / store.RESULTS).read_bytes() == whole
    assert [cell.protocol for cell in measured] == ["agnostic", "aware"]
    measured.clear()
    assert main(words(tiny_folder, out)) == 0
    assert measured == []
    assert (out / store.RESULTS).read_bytes() == whole


def test_text_is_judged_by_its_likelihood_and_labels_by_rank(tiny_folder, tmp_path, capsys):
    command = [
        "run",
        "--task",
        "ppl_books,babilong_qa4",
        "--model",
        str(tiny_folder),
        "--lengths",
        str(LENGTH),
    ]
    assert main([*command, "--samples", str(SAMPLES), "--out", str(tmp_path)]) == 0
    text, rooms = store.read(tmp_path)
    assert text.score is None
    nll, tokens = text.each.nll, text.each.tokens
    assert text.perplexity == pytest.approx(np.exp(np.dot(nll, tokens) / sum(tokens)), rel=1e-3)
    assert text.informative is True
    # The tiny model's tokens are bytes: bits a byte are bits a token.
    assert text.bits_per_byte == pytest.approx(np.log2(text.perplexity), rel=1e-3)
    assert rooms.perplexity is None
    assert set(rooms.each.ranked) <= {0, 1}
    assert rooms.ranked == pytest.approx(np.mean(rooms.each.ranked))
    assert "ppl " in capsys.readouterr().out


@pytest.mark.slow
def test_learned_weights_go_with_the_policy_and_into_the_row(tiny_folder, tmp_path, capsys):
    """Shut gates keep the window alone; the same policy with other gates is another cell."""
    model, name, out = load(tiny_folder), "write_gate(0.5, window=24)", tmp_path / "out"
    part = parse(name).admission
    layers = part.example_weights(jax.random.key(0), model.network)
    labels = {}
    for file, logit in (("shut", -50.0), ("open", 50.0)):
        gates = tmp_path / f"{file}.safetensors"
        moved = [layer | {"w2": 0 * layer["w2"], "b2": 0 * layer["b2"] + logit} for layer in layers]
        save_weights(gates, model, part, moved, notes={"window": 24 if file == "shut" else 32})
        labels[file] = f"{file}@{hashlib.sha256(gates.read_bytes()).hexdigest()[:16]}"
    command = ["run", "--task", "niah", "--model", str(tiny_folder), "--lengths", str(LENGTH)]
    command += ["--samples", str(SAMPLES), "--out", str(out)]
    assert main([*command, "--policy", name, "--gates", str(tmp_path / "shut.safetensors")]) == 0
    assert "note:" not in capsys.readouterr().err  # the window these were trained with
    full, shut = store.read(out)
    assert (full.cell.weights, shut.cell.weights) == ("", labels["shut"])
    assert shut.kept_fraction == pytest.approx(24 / (full.bytes.full / 256), rel=0.02)
    assert set(shut.example.held[:100]) == {0}
    assert (shut.switches.compress_at, shut.switches.prefill_attention) == ("write", "policy")
    assert table.name(shut) == f"{name} [shut]"
    task = tasks.tasks()["niah"]
    planned = grid.build(
        [task], [parse(name)], lengths=[LENGTH], seeds=[0], samples=1, protocol=("agnostic",)
    )
    planned = grid.with_weights(planned, model, str(tmp_path / "open.safetensors"))
    assert [cell.weights for cell in planned.cells] == ["", labels["open"]]
    (remark,) = planned.remarks
    assert "open.safetensors were trained with window=32 and are read with window=24" in remark
    weights = planned.weights[planned.cells[1].policy, labels["open"]]
    assert float(weights["admission"][0]["b2"][0]) == 50
    assert main([*command, "--policy", name]) == 2
    assert "ships none for write_gate" in capsys.readouterr().err


def test_results_of_another_version_are_left_alone(finished, tiny_folder, tmp_path, capsys):
    out = tmp_path / "out"
    for name, value in (("kvjax", "0.0.1"), ("fingerprint", "f" * 16), ("schema", 0)):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(finished, out)
        whose = json.loads((out / store.ABOUT).read_text())
        (out / store.ABOUT).write_text(json.dumps(whose | {name: value}))
        assert main(words(tiny_folder, out)) == 2
        assert f"another version ({name} " in capsys.readouterr().err
        assert (out / store.RESULTS).read_bytes() == (finished / store.RESULTS).read_bytes()
    assert main(["report", str(out)]) == 2
    assert "schema 0" in capsys.readouterr().err
