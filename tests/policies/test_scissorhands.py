"""Scissorhands against float64 NumPy: counts of attention at or above the mean, over the last queries."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept, observe

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies.scissorhands import Scissorhands


def counts(row: int, window: int, softcap: float = np.inf) -> np.ndarray:
    """[K, length]; no attention is so near the mean that rounding could matter."""
    length = rows.LENGTHS[row]
    result = np.zeros((rows.K, length))
    for n in range(rows.N):
        weights = rows.attention(row, n, softcap)
        for i in range(max(length - window, 0), length):
            seen = weights[i, : i + 1]
            if i:
                assert np.abs(seen * (i + 1) - 1).min() > 1e-4
            result[n // rows.G, : i + 1] += seen >= (1 - 1e-9) / (i + 1)
    return result


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (17, None), (400, None), (400, 1.5)])
def test_counts_over_the_history_window(window, softcap):
    seen = dataclasses.replace(rows.prompts(), softcap=softcap)
    actual = jax.jit(Scissorhands(window).score_prompt)(None, seen)
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_array_equal(actual[row, :, :length], counts(row, window, softcap or np.inf))


@pytest.mark.parametrize(
    ("amount", "sinks", "window", "recent"), [(1, 0, 8, 0), (14, 2, 20, 4), (0.1, 0, 400, 10)]
)
def test_the_persistent_stay_and_equal_counts_keep_the_lowest(amount, sinks, window, recent):
    policy = Policy(eviction=Scissorhands(window, recent), budget=Uniform(amount), sinks=sinks)
    right = [counts(row, window) for row in range(len(rows.LENGTHS))]
    ordered = np.sort(right[0][0])[::-1]
    assert (np.diff(ordered) == 0).any(), "no ties: counts say nothing about them"
    rows.keeps_the_best(policy, right, sinks=sinks, newest=recent, ties=True)


def test_attention_of_exactly_the_mean_counts():
    # Equal keys, 33 queries: whatever 1 / n is in float32, it is no less than the mean.
    ones = np.ones((1, 2, 33, 3))
    seen = observe((33,), 33, q=0.7 * ones, k=ones[:, :1], v=ones[:, :1])
    actual = np.asarray(jax.jit(Scissorhands(8).score_prompt)(None, seen))[0, 0]
    assert actual.tolist() == [16.0] * 26 + [14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0]
    bits = judge(Policy(eviction=Scissorhands(8, 2), budget=Uniform(5)), seen)
    assert kept(bits[0, 0]) == [0, 1, 2, 31, 32]


@pytest.mark.parametrize("call", [{"window": 0}, {"window": 2.5}, {"recent": -1}])
def test_what_is_no_number_of_tokens_is_refused(call):
    with pytest.raises(PolicyError):
        Scissorhands(**call)
