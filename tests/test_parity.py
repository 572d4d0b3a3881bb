"""Kept tokens beside kvpress: the comparison itself, and recorded answers of two families."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

import kvjax
from benchmarks import arguments, parity
from kvjax import decode
from kvjax.cli import InputError

RESULTS = Path(__file__).parents[1] / "results" / "parity"
ROWS = [json.loads(line) for line in (RESULTS / "parity.jsonl").read_text(encoding="utf-8").splitlines()]
QUICK = ("compactor", "cur", "cap", "qfilter", "leverage")


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def of(request, tmp_path_factory):
    subject = parity.subject(request.param, tmp_path_factory.mktemp("models"))
    return subject, parity.read(subject)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in parity.CASES]
)
def test_the_recorded_press_keeps_the_same_tokens(of, name):
    subject, reading = of
    answers = np.load(RESULTS / "kvpress.npz")[f"{subject.name}/{name}"]
    for ratio, bits in zip(parity.RATIOS, answers):
        case, network = parity.CASES[name], subject.model.network
        shape = network.num_layers, network.num_kv_heads, len(subject.prompt)
        theirs = np.unpackbits(bits)[: np.prod(shape)].reshape(shape).astype(bool)
        ours = parity.kept(subject, reading, case, ratio, theirs)
        same = -1 if "uniform" in case.budget else (-2, -1) if "ada" in case.budget else None
        np.testing.assert_array_equal(ours.sum(axis=same), theirs.sum(axis=same))
        where = {"model": subject.name, "method": name, "ratio": ratio}
        (row,) = [row for row in ROWS if where.items() <= row.items()]
        if row["verdict"] == "equal":
            assert (ours == theirs).all()
        else:  # equal scores, or a fault that has its reason
            assert 0 < (ours != theirs).sum() <= 0.2 * ours.sum()


SAME = [
    row["method"]
    for row in ROWS
    if (row["model"], row["ratio"], row["verdict"]) == ("llama", 0.5, "equal")
    and f"llama/{row['method']}/logits" in np.load(RESULTS / "kvpress.npz")
    and not parity.CASES[row["method"]].counted
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "compactor")) for name in SAME]
)
def test_what_follows_has_the_logits_of_the_press(tmp_path, monkeypatch, name):
    """By the real cut and the real step."""
    subject = parity.subject("llama", tmp_path)
    policy = parity.policy_of(parity.CASES[name], 0.5, parity.TOKENS // 2)
    weights = {part.place: subject.weights[part.name] for part in policy.learned}
    state, _ = kvjax.prefill(subject.model, policy, [subject.prompt.tolist()], context=768, weights=weights)
    monkeypatch.setattr(tiny, "weights", lambda policy: weights)
    state = decode.reserve(policy, state, parity.FED, 1)
    _, logits = tiny.feed(policy, state, subject.fed[None], tiny=subject.model)
    right = np.load(RESULTS / "kvpress.npz")[f"llama/{name}/logits"]
    np.testing.assert_allclose(logits[0], right, atol=2e-4)


def test_every_disagreement_has_a_reason():
    assert {row["method"] for row in ROWS} == set(parity.CASES)
    assert {row["model"] for row in ROWS} == {*parity.FAMILIES, "embedded"}
    differ = {row["method"] for row in ROWS if row["verdict"] == "differs"}
    assert differ == {name for name, case in parity.CASES.items() if case.reason}


def test_the_page_is_what_the_cases_say():
    page = parity.page(ROWS, "python -m benchmarks parity --peers DIR")
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page


def test_sets_are_equal_or_equal_but_for_rounding_or_differ():
    ours = np.array([[[1, 1, 0, 0], [1, 0, 1, 0]]], bool)
    score = np.array([[[3.0, 2.0, 1.0, 0.0], [3.0, 1.0, 1.0 + 1e-7, 0.0]]])
    assert parity.compared(ours, ours, score)["verdict"] == "equal"
    tied = np.array([[[1, 1, 0, 0], [1, 1, 0, 0]]], bool)
    row = parity.compared(ours, tied, score)
    assert (row["verdict"], row["missing"], row["heads"]) == ("rounding", 1, "1 of 2")
    row = parity.compared(ours, tied, np.where(score == 1, np.nan, score))
    assert (row["verdict"], row["nan_heads"]) == ("differs", 1)
    other = np.array([[[1, 0, 1, 0], [1, 0, 1, 0]]], bool)
    row = parity.compared(ours, other, score)
    assert row["verdict"] == "differs"
    assert row["gap"] == pytest.approx(1 / np.std([3, 2, 1, 0]), rel=0.01)


def test_without_peers_it_says_how_to_make_them(tmp_path):
    with pytest.raises(InputError):
        arguments.parse(["parity"])
    with pytest.raises(InputError, match=r"no Python interpreter. Make it with: python -m benchmarks peers"):
        parity.ask(tmp_path, [], tmp_path)
