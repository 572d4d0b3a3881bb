"""Compactor and leverage against float64 NumPy: the inverted Gram matrix, chunks, the standardised sum."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import prompt_rows as rows
import pytest

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies import compactor
from kvjax.policies.compactor import RIDGE, Compactor, Leverage

BEFORE = rows.KEYS + np.random.default_rng(4).standard_normal((1, rows.K, 1, rows.H))
"""Keys before RoPE, with a mean that centring takes away."""


def prompts(padding: float = 9.0):
    return rows.prompts(padding, k_pre=BEFORE)


def sketched(columns: int, seed: int) -> np.ndarray:
    """[K, H, S] as drawn; that it is Gaussian, and one for each layer and head, has a test of its own."""
    return np.asarray(compactor.gaussian(prompts(), columns, seed), np.float64)


def leverages(row: int, head: int, at: slice, sketch: np.ndarray) -> np.ndarray:
    keys = BEFORE[row, head, at]
    x = (keys - keys.mean(axis=0)) @ sketch[head]
    inverse = np.linalg.inv(x.T @ x + RIDGE * np.eye(x.shape[1]))
    return np.array([v @ inverse @ v for v in x])


def received(row: int, head: int, first: int, end: int, chunk: int) -> np.ndarray:
    """Attention inside chunks times the value's norm, averaged over neighbours; from ``first`` to ``end``."""
    total = np.zeros(end - first)
    for start in range(first, end, chunk):
        at = slice(start, min(start + chunk, end))
        keys = rows.KEYS[row, head, at]
        for n in range(head * rows.G, (head + 1) * rows.G):
            for query in rows.Q[row, n, at]:
                e = np.exp(keys @ query - (keys @ query).max())
                total[start - first : at.stop - first] += e / e.sum() / rows.G
    total *= np.sqrt((rows.VALUES[row, head, first:end] ** 2).sum(-1))
    wide = np.concatenate([[0.0], total, [0.0]])
    return (wide[:-2] + wide[1:-1] + wide[2:]) / 3


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / max(np.std(x, ddof=1), 1e-6)


def scores(row: int, part: Compactor) -> np.ndarray:
    """[K, length]; infinite for the first and last tokens."""
    length = rows.LENGTHS[row]
    result = np.full((rows.K, length), np.inf)
    end = length - part.last
    if end <= part.first:  # nothing to rank
        return result
    heads, sketch = range(rows.K), sketched(part.sketch, part.seed)
    attention = np.stack([received(row, h, part.first, end, part.chunk) for h in heads])
    spread = np.stack([leverages(row, h, slice(part.first, end), sketch) for h in heads])
    result[:, part.first : end] = standard(attention) + part.blend * standard(spread)
    return result


PARTS = (
    Compactor(chunk=8, first=3, last=2, sketch=5),
    Compactor(1.5, chunk=256, first=0, last=0, sketch=8, seed=3),
    Compactor(0.3, chunk=17, first=4, last=3, sketch=12),
)


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_score_is_attention_in_chunks_and_leverage(part):
    right = [scores(row, part) for row in range(len(rows.LENGTHS))]
    score = jax.jit(functools.partial(part.score_prompt, None))
    for padding in (9.0, np.nan):
        actual = np.asarray(score(prompts(padding)))
        for row, length in enumerate(rows.LENGTHS):
            judged = np.isfinite(right[row])
            np.testing.assert_allclose(actual[row, :, :length][judged], right[row][judged], atol=2e-4)
            assert (actual[row, :, :length][~judged] > 1e30).all()


@pytest.mark.parametrize("amount", [6, 0.5])
def test_the_best_stay_beside_the_first_and_the_last(amount):
    part = PARTS[0]
    right = [scores(row, part) for row in range(len(rows.LENGTHS))]
    for h in (0, 1):  # the first ones go when no other is left, so they are no protection of the policy
        assert np.isinf(right[0][h, :3]).all()
    policy = Policy(eviction=part, budget=Uniform(amount))
    keeps = functools.partial(rows.judge, policy)
    for padding in (9.0, np.nan):
        bits = keeps(prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            target = rows.target_of(amount, length)
            for h, score in enumerate(right[row]):
                assert rows.kept(bits[row, h]) == rows.best(score, length, target, newest=part.last)


@pytest.mark.parametrize("columns", [5, 8, 12])
def test_leverage_is_the_diagonal_of_a_projection(columns):
    part, sketch = Leverage(columns, seed=2), sketched(columns, 2)
    for padding in (9.0, np.nan):
        actual = np.asarray(jax.jit(functools.partial(part.score_prompt, None))(prompts(padding)))
        for row, length in enumerate(rows.LENGTHS):
            right = np.stack([leverages(row, h, slice(0, length), sketch) for h in range(rows.K)])
            np.testing.assert_allclose(actual[row, :, :length], right, atol=2e-4)


def test_a_key_that_no_other_spans_stays():
    """All keys lie on one line but the last; on that line leverage is the share of the squared distance."""
    keys = np.zeros((1, 1, 9, 4))
    keys[0, 0, :8, 0] = np.arange(8)
    keys[0, 0, 8, 1] = 100
    x = jnp.asarray(keys, jnp.float32)
    actual = compactor.leverage(x, jnp.ones((1, 9), bool), jnp.eye(4)[None])[0, 0]
    assert int(actual.argmax()) == 8
    np.testing.assert_allclose(actual.sum(), 2, atol=1e-2)  # the rank


def test_a_sketch_is_one_gaussian_for_each_layer_head_and_seed():
    drawn = [sketched(64, 0), sketched(64, 1)]
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1
    assert np.abs(drawn[0][0] - drawn[0][1]).max() > 0.1
    many = np.asarray(compactor.gaussian(prompts(), 4096, 0))
    np.testing.assert_allclose([many.mean(), many.var() * 4096], [0, 1], atol=0.02)


def test_nearly_equal_keys_do_not_fail():
    """A Cholesky factor of this Gram matrix does not exist in float32."""
    random = np.random.default_rng(0)
    keys = 1e4 * random.standard_normal((1, 1, 64, 1)) + 1e-3 * random.standard_normal((1, 1, 64, 8))
    actual = compactor.leverage(jnp.asarray(keys, jnp.float32), jnp.ones((1, 64), bool), jnp.eye(8)[None])
    assert np.isfinite(actual).all()
    assert (np.asarray(actual) <= 1.001).all()


@pytest.mark.parametrize("call", [{"blend": -1.0}, {"chunk": 0}, {"sketch": 0}, {"first": -1}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError):
        Compactor(**call)
