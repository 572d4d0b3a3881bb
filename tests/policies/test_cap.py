"""CapKV against float64 NumPy: weights by the anchor's cosine, leverage under the weighted matrix."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import prompt_rows as rows
import pytest

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.models.rope import Rope, rotate
from kvjax.policies.cap import LEAST, Cap

THETA = 30.0
BEFORE = rows.Q + np.random.default_rng(5).standard_normal((1, rows.N, 1, rows.H))
TURN = functools.partial(rotate, rope=Rope(theta=THETA))


def prompts(padding: float = 9.0, turn=TURN):
    return dataclasses.replace(rows.prompts(padding, q_pre=BEFORE), rotate=turn)


def rotation(position: int) -> np.ndarray:
    """[H, H] that turns a column: pair (i, i + H / 2) by position * THETA ** (-2 i / H)."""
    half = rows.H // 2
    angle = position * THETA ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def scores(row: int, part: Cap, turned: bool = True) -> np.ndarray:
    """[K, length]; infinite for the sinks."""
    length = rows.LENGTHS[row]
    result = np.full((rows.K, length), np.inf)
    if length <= part.sinks:
        return result
    r = np.mean([rotation(length + i) for i in range(part.ahead)], axis=0) if turned else np.eye(rows.H)
    at = slice(part.sinks, length)
    for h in range(rows.K):
        keys, values, heads = rows.KEYS[row, h, at], rows.VALUES[row, h, at], []
        for n in range(h * rows.G, (h + 1) * rows.G):
            anchor = r @ BEFORE[row, n, at].mean(axis=0)
            cosine = keys @ anchor / np.linalg.norm(keys, axis=1) / np.linalg.norm(anchor)
            w = np.exp(part.tau * (cosine - cosine.max()))
            a = np.eye(rows.H) + sum((x + LEAST) * np.outer(v, v) for x, v in zip(w, values))
            heads.append([x * (v @ np.linalg.inv(a) @ v) for x, v in zip(w, values)])
        result[h, part.sinks :] = np.mean(heads, axis=0)
    return result


@pytest.mark.parametrize(("part", "turn"), [(Cap(ahead=64), TURN), (Cap(0.7, ahead=5, sinks=0), None)])
def test_score_is_weight_times_leverage(part, turn):
    score = jax.jit(functools.partial(part.score_prompt, None))
    for padding in (9.0, np.nan):
        actual = np.asarray(score(prompts(padding, turn)))
        for row, length in enumerate(rows.LENGTHS):
            right = scores(row, part, turned=turn is not None)
            judged = np.isfinite(right)
            np.testing.assert_allclose(actual[row, :, :length][judged], right[judged], rtol=3e-4, atol=1e-6)
            assert (actual[row, :, :length][~judged] > 1e30).all()


@pytest.mark.parametrize("amount", [3, 0.5])
def test_the_best_stay_behind_the_sinks(amount):
    right = [scores(row, Cap(ahead=64)) for row in range(len(rows.LENGTHS))]
    for padding in (9.0, np.nan):
        bits = rows.judge(Policy(eviction=Cap(ahead=64), budget=Uniform(amount)), prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            target = rows.target_of(amount, length)
            for h, score in enumerate(right[row]):
                assert rows.gap(score, length, target, min(4, length), 0) > 1e-6
                assert rows.kept(bits[row, h]) == rows.best(score, length, target)


@pytest.mark.parametrize("call", [{"tau": -1.0}, {"tau": 100.0}, {"ahead": 0}, {"sinks": -1}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError):
        Cap(**call)
