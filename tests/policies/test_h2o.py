"""H2O against float64 NumPy: causal mass summed over the prompt, heaviest and newest half and half."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import judge, kept, observe, with_mass

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies.h2o import H2O, _turns

turns = jax.jit(_turns)


def mass(row: int, *, average: bool = False, softcap: float = np.inf) -> np.ndarray:
    """[K, length]"""
    heads = [rows.attention(row, n, softcap).sum(axis=0) for n in range(rows.N)]
    total = np.reshape(heads, (rows.K, rows.G, -1)).mean(axis=1)
    return total / (rows.LENGTHS[row] - np.arange(rows.LENGTHS[row])) if average else total


def halves(score: np.ndarray, target: int) -> set[int]:
    """The newest half (an odd slot included), and the heaviest of the others; ties to the lowest."""
    length = len(score)
    newest = min(-(-target // 2), length)
    older = sorted(range(length - newest), key=lambda p: (-score[p], p))
    return {*range(length - newest, length), *older[: target - newest]}


@pytest.mark.parametrize("average", [False, True])
def test_mass_is_summed_over_all_queries_and_averaged_only_when_asked(average):
    eviction = H2O(0, average=average)
    actual = jax.jit(eviction.score_prompt)(None, with_mass(eviction, rows.prompts()))
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_allclose(actual[row, :, :length], mass(row, average=average), rtol=2e-5)


def test_bounded_scores_are_bounded_here_too():
    seen = dataclasses.replace(rows.prompts(), softcap=1.5)
    actual = jax.jit(H2O(0).score_prompt)(None, with_mass(H2O(0), seen))
    for row, length in enumerate(rows.LENGTHS):
        np.testing.assert_allclose(actual[row, :, :length], mass(row, softcap=1.5), rtol=2e-5)


def test_mass_of_equal_keys_by_hand():
    # Query i gives each of its i + 1 keys 1 / (i + 1): old tokens gather the most.
    ones = np.ones((1, 2, 4, 3))
    seen = observe((4,), 4, q=ones, k=ones[:, :1], v=ones[:, :1])
    actual = jax.jit(H2O(0).score_prompt)(None, with_mass(H2O(0), seen))[0, 0]
    np.testing.assert_allclose(actual, [1 + 1 / 2 + 1 / 3 + 1 / 4, 13 / 12, 7 / 12, 1 / 4], rtol=1e-6)


@pytest.mark.parametrize(("amount", "sinks", "recent"), [(1, 0, 0), (12, 2, 6), (0.05, 2, 5)])
def test_heavy_hitters_beside_a_fixed_number_of_newest(amount, sinks, recent):
    policy = Policy(eviction=H2O(recent), budget=Uniform(amount), sinks=sinks)
    right = [mass(row) for row in range(len(rows.LENGTHS))]
    rows.keeps_the_best(policy, right, sinks=sinks, newest=recent)


@pytest.mark.parametrize("amount", [7, 0.5])
def test_half_of_what_stays_is_newest_at_any_target(amount):
    for padding in (9.0, np.nan):
        bits = judge(Policy(eviction=H2O(), budget=Uniform(amount)), rows.prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            target = rows.target_of(amount, length)
            for h, score in enumerate(mass(row)):
                assert set(kept(bits[row, h])) == halves(score, target)


@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_turns_nest_the_halves_of_every_target(length):
    random = np.random.default_rng(length)
    scores = [random.random(length), np.arange(length), -np.arange(length), random.integers(0, 3, length)]
    order = np.stack([np.argsort(-score, kind="stable") for score in scores])
    place = np.asarray(turns(length - 1 - order[None]))[0]
    for score, ages, places in zip(scores, order, place):
        assert sorted(places.tolist()) == list(range(1, length + 1))
        for target in range(1, length + 1):
            assert set(ages[places <= target].tolist()) == halves(score, target)


@pytest.mark.parametrize("call", [{"recent": -1}, {"recent": 0.5}, {"average": 1}])
def test_what_is_no_number_of_tokens_or_switch_is_refused(call):
    with pytest.raises(PolicyError):
        H2O(**call)
