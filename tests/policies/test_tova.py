"""TOVA against float64 NumPy: one row of attention, the last, one mean over every head of the layer."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept, observe, with_mass

from kvjax.algebra import Policy
from kvjax.budgets.uniform import Uniform
from kvjax.policies.tova import Tova


def scores(row: int, softcap: float = np.inf) -> np.ndarray:
    """[K, length], the same for every KV head."""
    last = np.mean([rows.attention(row, n, softcap)[-1] for n in range(rows.N)], axis=0)
    return np.stack([last] * rows.K)


RIGHT = [scores(row) for row in range(len(rows.LENGTHS))]


def test_score_is_the_last_real_querys_attention():
    actual = jax.jit(Tova().score_prompt)(None, with_mass(Tova(), rows.prompts()))
    assert actual.shape == (len(rows.LENGTHS), 1, rows.T)
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_allclose(actual[row, 0, :length], RIGHT[row][0], rtol=2e-5)
        np.testing.assert_allclose(actual[row, 0, :length].sum(), 1, rtol=1e-5)


def test_bounded_scores_are_bounded_here_too():
    seen = dataclasses.replace(rows.prompts(), softcap=1.5)
    actual = jax.jit(Tova().score_prompt)(None, with_mass(Tova(), seen))
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_allclose(actual[row, 0, :length], scores(row, 1.5)[0], rtol=2e-5)


@pytest.mark.parametrize(("amount", "sinks", "recent"), [(1, 0, 0), (9, 0, 1), (0.5, 2, 3)])
def test_all_heads_keep_the_best_of_the_mean(amount, sinks, recent):
    policy = Policy(eviction=Tova(), budget=Uniform(amount), sinks=sinks, recent=recent)
    rows.keeps_the_best(policy, RIGHT, sinks=sinks, newest=recent)


def test_the_last_token_is_not_protected_and_equal_attention_keeps_the_lowest_positions():
    # The last query turns away from its own key; all the others are the same.
    k = np.ones((1, 2, 12, 3))
    k[:, :, -1] = -1
    seen = observe((12,), 12, q=np.ones((1, 4, 12, 3)), k=k, v=k)
    bits = judge(Policy(eviction=Tova(), budget=Uniform(5)), seen)
    assert [kept(x) for x in bits[0]] == [[0, 1, 2, 3, 4]] * 2
    bits = judge(Policy(eviction=Tova(), budget=Uniform(11)), seen)
    assert [kept(x) for x in bits[0]] == [list(range(11))] * 2
