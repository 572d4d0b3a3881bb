"""CurDKV against float64 NumPy: shares of squared norms in windows, their product, the first tokens last."""

from __future__ import annotations

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept, observe

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies.cur import Cur


def shares(x: np.ndarray, window: int) -> np.ndarray:
    """[length] of [length, H]."""
    squares = (x**2).sum(-1)
    starts = range(0, len(x), window)
    return np.concatenate([squares[i : i + window] / squares[i : i + window].sum() for i in starts])


def scores(row: int, window: int, sinks: int) -> np.ndarray:
    """[K, length]; infinite for the sinks."""
    length = rows.LENGTHS[row]
    score = np.stack(
        [
            shares(rows.KEYS[row, h, :length], window) * shares(rows.VALUES[row, h, :length], window)
            for h in range(rows.K)
        ]
    )
    score /= score.sum(axis=-1, keepdims=True)
    score[:, :sinks] = np.inf
    return score


@pytest.mark.parametrize(("window", "sinks"), [(16, 4), (7, 0), (64, 2)])
def test_score_is_the_product_of_shares(window, sinks):
    for padding in (9.0, np.nan):
        actual = np.asarray(jax.jit(Cur(window, sinks).score_prompt)(None, rows.prompts(padding)))
        for row, length in enumerate(rows.LENGTHS):
            right = scores(row, window, sinks)
            judged = np.isfinite(right)
            np.testing.assert_allclose(actual[row, :, :length][judged], right[judged], rtol=1e-5, atol=1e-7)
            assert (actual[row, :, : min(sinks, length)] > 1e30).all()


@pytest.mark.parametrize(("amount", "sinks"), [(3, 4), (0.5, 4), (11, 0)])
def test_the_best_stay(amount, sinks):
    right = [scores(row, 7, sinks) for row in range(len(rows.LENGTHS))]
    rows.keeps_the_best(Policy(eviction=Cur(7, sinks), budget=Uniform(amount)), right, ties=True)


def test_a_window_of_zeros_counts_as_nothing():
    keys = np.ones((1, 1, 8, 2))
    keys[0, 0, :4] = 0
    policy = Policy(eviction=Cur(4, sinks=0), budget=Uniform(4))
    assert kept(judge(policy, observe((8,), 8, k=keys, v=np.ones((1, 1, 8, 2))))[0, 0]) == [4, 5, 6, 7]


@pytest.mark.parametrize("call", [{"window": 0}, {"sinks": -1}])
def test_what_is_no_number_of_tokens_is_refused(call):
    with pytest.raises(PolicyError):
        Cur(**call)
