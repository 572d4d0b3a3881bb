"""Passages: 128 tokens are fed, and distributions are compared with the full cache's on the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode
from kvjax.eval import tasks
from kvjax.eval.__main__ import main
from kvjax.eval.measure import batch, forced, runner, store
from kvjax.eval.report import markdown, table
from kvjax.eval.report.table import Results
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.passages import FED

FED_TOKENS = [tiny.prompt(12)[i:] for i in range(2)]  # rows of 12 and of 11


def state_of(policy, room: int):
    prompts = [tiny.prompt(40), tiny.prompt(33)]
    weights = tiny.weights(policy)
    state, _ = kvjax.prefill(tiny.model(), policy, prompts, context=tiny.CONTEXT, weights=weights)
    return decode.roomy(policy, decode.reserve(policy, state, room, 1), 1, room)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_the_distance_is_that_of_the_distributions():
    model, full, window = tiny.model(), kvjax.policy("full"), kvjax.policy("window(12) + sinks(2)")
    feed = [row[:-1] for row in FED_TOKENS]
    target = [row[1:] for row in FED_TOKENS]
    right = forced.logits(model, full, state_of(full, 12), feed)
    own = np.asarray(forced.logits(model, window, state_of(window, 12), feed))
    _, steps = forced.steps(model, window, state_of(window, 12), feed, target, forced=True, reference=right)
    for row, tokens in enumerate(target):
        count = len(tokens)
        p, q = softmax(np.asarray(right)[row, :count]), softmax(own[row, :count])
        np.testing.assert_allclose(
            steps.kl[row, :count], (p * np.log(p / q)).sum(axis=-1), rtol=2e-3, atol=1e-6
        )
        np.testing.assert_array_equal(steps.top[row, :count], p.argmax(axis=-1) == q.argmax(axis=-1))
        nll = -np.log(q[np.arange(count), tokens])
        np.testing.assert_allclose(steps.nll[row, :count], nll, rtol=1e-4)
    assert steps.kl[0, :11].max() > 0.01
    _, same = forced.steps(model, full, state_of(full, 12), feed, target, forced=True, reference=right)
    np.testing.assert_allclose(same.kl[0, :11], 0, atol=1e-6)
    assert same.top[0, :11].all()
    _, alone = forced.steps(model, full, state_of(full, 12), feed, target, forced=True)
    assert alone.kl is alone.top is None


def test_the_full_caches_logits_are_those_of_the_whole_text():
    model, full = tiny.model(), kvjax.policy("full")
    logits = forced.logits(model, full, state_of(full, 12), [row[:-1] for row in FED_TOKENS])
    whole = [tiny.prompt(40) + FED_TOKENS[0][:5], tiny.prompt(33) + FED_TOKENS[1][:5]]
    _, right = kvjax.prefill(model, full, whole, context=tiny.CONTEXT)
    np.testing.assert_allclose(logits[:, 4], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [0, 5])
def test_a_passage_ends_with_a_word_and_128_tokens_of_it_are_fed(tiny_folder, index):
    model = kvjax.load(tiny_folder)
    drawn = runner.draw(tasks.tasks()["text_books"], model, Data(None), length=384, seed=0, count=index + 1)
    sample, encoded = drawn[index]
    assert len(encoded.answer) == FED == (encoded.scored == 0).sum()
    assert 384 - 12 <= len(encoded.context) + FED <= 384
    assert model.text.encode(sample.context + sample.answer) == encoded.context + encoded.answer
    assert sample.context[:20] != drawn[0][0].context[:20] or index == 0


@pytest.mark.usefixtures("no_pack")
def test_rows_of_passages_say_how_far_they_are_from_the_full_cache(tiny_folder, tmp_path):
    command = [
        "run",
        "--task",
        "text_books",
        "--model",
        str(tiny_folder),
        "--lengths",
        "384",
        "--samples",
        "2",
    ]
    command += ["--policy", "window(100)", "--policy", "knorm + uniform(0.25)", "--out", str(tmp_path)]
    made = []
    with pytest.MonkeyPatch.context() as patch:
        real = batch.reference
        patch.setattr(batch, "reference", lambda *args, **options: made.append(1) or real(*args, **options))
        assert main(command) == 0
    assert len(made) == 1, "the full cache's logits are made once"
    full, *others = store.read(tmp_path)
    assert max(full.each.kl) < 1e-6
    assert full.each.top == [1, 1]
    assert [len(row.each.kl) for row in others] == [2, 2]
    assert all(min(row.each.kl) > 0 and min(row.each.top) >= 0 for row in others)
    assert [row.each.tokens for row in others] == [[FED] * 2] * 2
    shown = table.distances(Results((full, *others)))
    assert f"{np.mean(others[0].each.kl):.4f} (" in shown
    assert shown.count("\n") == 3
    assert shown in markdown.text(Results((full, *others)))
