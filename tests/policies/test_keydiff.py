"""KeyDiff against float64 NumPy: cosine to the mean of the unit keys; the dissimilar stay."""

from __future__ import annotations

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept, observe

from kvjax.algebra import Policy
from kvjax.budgets.uniform import Uniform
from kvjax.policies.keydiff import KeyDiff


def scores(row: int) -> np.ndarray:
    """[K, length]"""
    keys = rows.KEYS[row, :, : rows.LENGTHS[row]]
    unit = keys / np.sqrt((keys**2).sum(-1, keepdims=True))
    anchor = unit.mean(axis=1, keepdims=True)
    return -(keys * anchor).sum(-1) / np.sqrt((keys**2).sum(-1) * (anchor**2).sum(-1))


RIGHT = [scores(row) for row in range(len(rows.LENGTHS))]


def test_score_is_minus_the_cosine_to_the_anchor_of_real_keys():
    actual = jax.jit(KeyDiff().score_prompt)(None, rows.prompts())
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_allclose(actual[row, :, :length], RIGHT[row], atol=1e-6)


@pytest.mark.parametrize(("amount", "sinks", "recent"), [(1, 0, 0), (0.5, 2, 3), (0.1, 3, 4)])
def test_the_least_alike_stay(amount, sinks, recent):
    policy = Policy(eviction=KeyDiff(), budget=Uniform(amount), sinks=sinks, recent=recent)
    rows.keeps_the_best(policy, RIGHT, sinks=sinks, newest=recent)


def test_length_of_a_key_does_not_matter_and_equals_keep_the_lowest_positions():
    east, north = np.array([1.0, 0]), np.array([0, 1.0])
    keys = np.stack([(3.0 + i) * (north if i in (4, 7) else east) for i in range(10)])[None, None]
    # Unit keys of powers of two are exact, so equal directions tie to the last bit.
    keys = 2.0 ** np.round(np.log2(np.abs(keys) + (keys == 0))) * (keys != 0)
    seen = observe((10,), 10, k=keys)
    assert kept(judge(Policy(eviction=KeyDiff(), budget=Uniform(4)), seen)[0, 0]) == [0, 1, 4, 7]


def test_a_key_of_zeros_is_neither_alike_nor_unlike():
    keys = np.zeros((1, 1, 3, 2))
    keys[0, 0, :2] = [[2, 0], [4, 0]]
    actual = jax.jit(KeyDiff().score_prompt)(None, observe((3,), 3, k=keys))
    np.testing.assert_allclose(actual[0, 0], [-1, -1, 0])
