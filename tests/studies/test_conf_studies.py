"""The studies of CONF-KV: what is measured step by step is what the cache does, on a tiny random model."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from kvjax import decode
from kvjax import layer as layers
from kvjax.algebra import Policy
from kvjax.budgets.confidence import Confidence
from kvjax.eval.measure import forced
from kvjax.eval.tasks.sample import Encoded, Sample
from kvjax.policies.conf_kv import ConfKV
from kvjax.types import Heads
from studies.conf_kv import pictures, premise, replay, schedules
from studies.conf_kv.__main__ import main
from studies.conf_kv.replay import Rule, Stage

TIGHT, LOOSE, RECENT, PROMPT, ANSWER = 10, 16, 4, 30, 34
WEIGHTS = (0.5, 0.2, 0.3)

pytestmark = pytest.mark.slow  # a paper's laboratory, outside the library


def window(seed: int, prompt: int = PROMPT, answer: int = ANSWER) -> tuple[Sample, Encoded]:
    ids = tiny.prompt(prompt + answer, seed)
    encoded = Encoded(
        context=ids[:prompt],
        question=[],
        prefix=[],
        answer=ids[prompt:],
        needed=np.zeros(prompt, bool),
        scored=np.zeros(answer, int),
        labels=(),
        bytes=1,
    )
    return Sample(context="", answer=""), encoded


SAMPLES = [window(0), window(1, PROMPT - 5, ANSWER - 3)]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage.of(tiny.model(), SAMPLES, length=PROMPT + ANSWER, loose=LOOSE, recent=RECENT)


@pytest.fixture(scope="module")
def threshold(stage) -> float:
    """So that about half of the steps are sure."""
    walks = stage.play(Rule(tight=LOOSE, loose=LOOSE, weights=WEIGHTS))
    return float(np.median(np.concatenate([w["sure"] for w in walks])))


@pytest.fixture(scope="module")
def rule(threshold) -> Rule:
    return Rule(tight=TIGHT, loose=LOOSE, threshold=threshold, weights=WEIGHTS)


def test_a_rule_walks_as_the_policy_of_its_numbers(stage, rule):
    wh, wm, wp = WEIGHTS
    budget = Confidence(TIGHT, LOOSE, threshold=rule.threshold, wh=wh, wm=wm, wp=wp)
    policy = Policy(eviction=ConfKV(recent=RECENT), budget=budget)
    heads = [e.context[:-1] for _, e in SAMPLES]
    state, _ = decode.prefill(tiny.model(), policy, heads, context=stage.context)
    feed = [[e.context[-1], *e.answer[:-1]] for _, e in SAMPLES]
    answers = [e.answer for _, e in SAMPLES]
    state = decode.roomy(policy, state, 1)
    _, found = forced.steps(tiny.model(), policy, state, feed, answers, forced=True)
    played = stage.play(rule)
    sure = np.concatenate([w["sure"] for w in played]) >= rule.threshold
    assert 0.3 < sure.mean() < 0.7
    for row, walk in enumerate(played):
        steps = len(answers[row])
        assert {len(x) for x in walk.values()} == {steps}
        np.testing.assert_allclose(walk["nll"], found.nll[row, :steps], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(walk["live"], found.live[row, :steps])
        assert set(walk["target"]) == {TIGHT, LOOSE}
        # The target is an upper bound; the cache grows by one token a step.
        assert (walk["live"] <= walk["target"]).all()
        assert np.diff(walk["live"]).max() == 1


def test_a_schedule_is_played_again_whatever_ranks(stage, rule):
    facts = schedules.rate(stage, rule, lambda line: None)
    entries = {e["name"].split()[0]: e for e in facts["entries"]}
    assert list(entries) == ["conf_kv", "recency", "attention", "random", "shuffled", "inverse", "constant"]
    own = entries["conf_kv"]
    for name in ("recency", "attention", "random"):
        assert entries[name]["live"] == own["live"]
        assert entries[name]["nll"] != own["nll"]
        mean, low, high = entries[name]["difference"]
        assert low <= mean <= high
        assert mean == pytest.approx(entries[name]["nll"] - own["nll"], abs=1e-6)
    assert set(facts["signal"]) == {"autocorrelation", "gain", "gain_correlation"}
    assert len(facts["trace"]["live"]) == ANSWER
    assert sum(facts["histogram"]["counts"]) == 2 * ANSWER - 3


def test_a_repeat_that_drops_other_numbers_is_refused(stage, rule, monkeypatch):
    real = Stage.play

    def off(self, how, schedule=None):
        return real(self, how, None if schedule is None else np.full_like(schedule, TIGHT))

    monkeypatch.setattr(Stage, "play", off)
    with pytest.raises(ValueError, match="other numbers of tokens"):
        schedules.rate(stage, rule, lambda line: None)


def test_gain_is_zero_on_the_line_of_constant_budgets(stage, rule):
    constants = schedules.Constants.of(stage, rule, (TIGHT, LOOSE), lambda line: None)
    flat = stage.play(dataclasses.replace(rule, tight=LOOSE))
    np.testing.assert_allclose(constants.gain(flat), 0, atol=1e-6)
    better = [w | {"nll": w["nll"] - 0.25} for w in flat]
    np.testing.assert_allclose(constants.gain(better), 0.25, atol=1e-6)
    assert constants.gain([w | {"live": w["live"] - 9} for w in flat]) is None
    assert schedules.best([{"gain": None}, {"gain": [0.1]}, {"gain": [0.2]}]) == {"gain": [0.2]}


def test_draws_are_uniform_and_differ_by_seed():
    pos = jnp.arange(4000)
    first, second = (np.asarray(replay.drawn(jnp.asarray(seed), pos)) for seed in (0, 1))
    for draws in (first, second):
        assert 0 <= draws.min() < 0.01 < 0.99 < draws.max() < 1
        assert draws.mean() == pytest.approx(0.5, abs=0.02)
        assert draws.std() == pytest.approx(12**-0.5, abs=0.01)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06


def without(tokens: np.ndarray, t: int, low: int, high: int) -> np.ndarray:
    """Log-probabilities after token t, read by a decode step off a real cache less some positions."""
    model, policy = tiny.model(), Policy()
    state, _ = decode.prefill(model, policy, [tokens[:t].tolist()], context=64)

    def attend(site: layers.LayerInfo, heads: Heads, room):
        age = t - jnp.arange(t)
        left = (age < low) | (age > high)
        k, v = (jnp.swapaxes(x[:, :, :t], 1, 2)[:, left] for x in (room.ring.k, room.ring.v))
        k, v = jnp.concatenate([k, heads.k], axis=1), jnp.concatenate([v, heads.v], axis=1)
        q = heads.q.reshape(1, 2, 2, -1)
        s = jnp.einsum("bkgh,bskh->bkgs", q, k) * q.shape[-1] ** -0.5
        out = jnp.einsum("bkgs,bskh->bkgh", jax.nn.softmax(s), v)
        return out.reshape(1, 1, 4, -1), room

    x, _ = decode.run_layers(
        model.network, policy, model.params, {}, state, jnp.asarray([[tokens[t]]]), attend
    )
    return np.asarray(jax.nn.log_softmax(model.network.logits(model.params, x[:, 0])))[0]


@pytest.mark.parametrize("cut", [(1, 5), (6, 40)])
def test_the_shift_is_that_of_a_cache_less_those_tokens(cut):
    text = np.asarray(tiny.prompt(26))
    model = tiny.model()
    tokens = jnp.asarray(np.stack([tiny.prompt(26, seed=3), text]))
    full, gone = premise.steps(model.network, model.params, tokens, 13, jnp.asarray(cut))
    for t in (13, 19):
        np.testing.assert_allclose(full[1, t - 13], without(text, t, 1, 0), atol=2e-4)
        np.testing.assert_allclose(gone[1, t - 13], without(text, t, *cut), atol=2e-4)
    assert np.abs(full - gone).max() > 0.1


def test_premise_tells_a_planted_relation():
    random = np.random.default_rng(0)
    sure = random.uniform(0, 1, (20, 50))
    noise = random.normal(0, 0.1, (3, 20, 50))
    series = {"confidence": sure, "recent": 1 - sure + noise[0], "older": sure + noise[1]}
    series |= dict.fromkeys(premise.PARTS, sure + noise[2])
    tree = premise.as_json(series, Confidence(), 8)
    for name, sign in (("recent", -1), ("older", 1)):
        r, low, high = tree["shifts"][name]["r"]["confidence"]
        assert 0.9 < sign * r < 1
        assert low <= r <= high
        means = [sign * b["shift"] for b in tree["shifts"][name]["bins"]]
        assert means == sorted(means)
    assert tree["steps"] == sum(tree["histogram"]["counts"]) == 1000
    assert tree["sure_share"]["0.5"] == pytest.approx((sure >= 0.5).mean())


def test_the_command(tiny_folder, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "none"))
    out = tmp_path / "out"
    words = ["--model", str(tiny_folder), "--lengths", "256", "--samples", "2", "--out", str(out)]
    assert main([*words, "--study", "premise", "--task", "ppl_books"]) == 0
    trees = json.loads((out / "premise_ppl_books_256.json").read_text())
    assert (trees["cut"], trees["windows"], trees["data"]) == (32, 2, "generated")
    assert trees["steps"] >= 2 * 110
    assert capsys.readouterr().out.split() == [
        str(out / "premise_ppl_books_256.json"), str(out / "premise.png")
    ]  # fmt: skip
    assert (out / "premise.png").stat().st_size > 10_000
    assert main([*words, "--study", "--task", "niah"]) == 2
    assert "asks questions" in capsys.readouterr().err


def test_pictures_of_every_study(tmp_path, stage, rule):
    pytest.importorskip("matplotlib")
    what = {"task": "a", "length": 64, "samples": 2}
    rate = schedules.rate(stage, rule, lambda line: None)
    (tmp_path / "rate_a_64.json").write_text(json.dumps(what | rate))
    constants = schedules.Constants.of(stage, rule, (TIGHT - 2, LOOSE), lambda line: None)
    entries = schedules.grid(stage, schedules.sweep(rule), constants, lambda line: None)
    assert [e["name"] for e in entries][:2] == ["threshold 0.5", "threshold 0.6"]
    sweep = {"constant": constants.as_json(), "entries": entries}
    (tmp_path / "sweep_a_64.json").write_text(json.dumps(what | sweep))
    assert [file.name for file in pictures.draw(tmp_path)] == ["rate.png", "sawtooth.png", "sweep.png"]


def test_the_first_token_goes_below_the_cliff():
    """Score of the first token: alpha. Of the last that would stay: its recency 1 - share, and no mass."""
    for share in (0.125, 0.25, 0.5):
        alpha = schedules.cliff(share)
        assert alpha == pytest.approx((1 - alpha) * (1 - share))
    assert schedules.cliff(0.25) == pytest.approx(3 / 7)
