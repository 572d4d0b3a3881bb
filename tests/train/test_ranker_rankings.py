"""Rankings against enumeration: the cost in closed form, log pi of every permutation, the RLOO gradient."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from train.ranker import rankings
from train.ranker.optimizer import clip_each, optimizer
from train.ranker.settings import Rate

ALL = np.ones(4, bool)
WORTH = np.asarray([0.7, 0.05, 1.9, 0.4], np.float32)
SCORE = np.asarray([0.3, -0.8, 0.1, 0.6], np.float32)


def orders(n: int) -> np.ndarray:
    return np.asarray(list(itertools.permutations(range(n))), np.int32)


def evicted(worth: np.ndarray, ranking: np.ndarray, budget: int) -> float:
    return float(worth[ranking[budget:]].sum())


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_closed_form_is_the_sum_over_all_budgets(n):
    worth = np.random.default_rng(n).random(n).astype(np.float32)
    for ranking in orders(n):
        want = sum(evicted(worth, ranking, budget) for budget in range(1, n))
        np.testing.assert_allclose(rankings.cost(worth, ranking), want, rtol=1e-5, atol=1e-6)
        for budget in range(n):
            one = rankings.cost(worth, ranking, np.float32(budget))
            np.testing.assert_allclose(one, evicted(worth, ranking, budget), rtol=1e-5, atol=1e-6)


def test_the_optimal_ranking_costs_least_and_what_is_no_candidate_nothing():
    worth = np.asarray([0.2, 9.0, 0.5, 0.1, 9.0], np.float32)
    may = np.asarray([True, False, True, True, False])
    shown = np.where(may, worth, 0)
    cost = rankings.cost(shown, rankings.best(worth, may))
    costs = [sum(r * shown[i] for r, i in enumerate((*p, 1, 4))) for p in itertools.permutations((0, 2, 3))]
    np.testing.assert_allclose(cost, min(costs), rtol=1e-6)
    np.testing.assert_array_equal(rankings.best(worth, may), [2, 0, 3, 1, 4])
    np.testing.assert_array_equal(rankings.true_rank(worth, may), [1, 3, 0, 2, 4])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_log_pi_is_that_of_drawing_without_replacement(n):
    score = np.random.default_rng(n).normal(0, 2, n)
    weight, total = np.exp(score), 0.0
    for ranking in orders(n):
        left, want = list(range(n)), 0.0
        for i in ranking:
            want += math.log(weight[i] / weight[left].sum())
            left.remove(i)
        log_pi = rankings.log_probability(jnp.asarray(score, jnp.float32), np.ones(n, bool), ranking)
        np.testing.assert_allclose(log_pi, want, rtol=1e-5, atol=1e-5)
        total += math.exp(want)
    np.testing.assert_allclose(total, 1)


def test_what_is_no_candidate_has_no_part_in_log_pi_and_no_gradient():
    score = jnp.asarray([0.3, 7.0, -0.5, 1.2, -9.0])
    may = np.asarray([True, False, True, True, False])
    ranking = np.asarray([3, 0, 2, 1, 4])
    few = rankings.log_probability(score[may], np.ones(3, bool), np.asarray([2, 0, 1]))
    log_pi, slope = jax.value_and_grad(rankings.log_probability)(score, may, ranking)
    np.testing.assert_allclose(log_pi, few, rtol=1e-6)
    assert np.isfinite(slope).all()
    np.testing.assert_array_equal(np.asarray(slope)[~may], 0)


def test_drawn_rankings_come_as_often_as_log_pi_says():
    count, may = 20_000, np.ones(3, bool)
    score = jnp.asarray([0.9, 0.0, -0.4])
    drawn = np.asarray(rankings.drawn(jax.random.key(0), score, may, count))
    for ranking in orders(3):
        share = (drawn == ranking).all(axis=1).mean()
        want = math.exp(rankings.log_probability(score, may, ranking))
        assert abs(share - want) < 4 * math.sqrt(want * (1 - want) / count)


def expected_reward(score: jax.Array) -> jax.Array:
    least = rankings.cost(WORTH, rankings.best(WORTH, ALL))
    each = [
        jnp.exp(rankings.log_probability(score, ALL, r)) * -rankings.cost(WORTH, r) / least for r in orders(4)
    ]
    return sum(each)


def test_the_rloo_gradients_mean_is_the_exact_gradient():
    exact = np.asarray(jax.grad(expected_reward)(jnp.asarray(SCORE)))
    least = rankings.cost(WORTH, rankings.best(WORTH, ALL))

    def one(key: jax.Array) -> jax.Array:
        drawn = rankings.drawn(key, SCORE, ALL, 8)
        gain = rankings.advantage(-rankings.cost(WORTH, drawn) / least, normalise=False)
        loss = lambda score: (gain * rankings.log_probability(score, ALL, drawn)).mean()  # noqa: E731
        return jax.grad(loss)(jnp.asarray(SCORE))

    draws = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 6000)))
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - exact) < 4 * error).all()
    assert (np.abs(exact) > 20 * error).any(), "noise: the test would pass with any gradient"


def test_advantages_leave_one_out_and_are_normalised():
    reward = np.asarray([[-1.0, -2.0], [-3.0, -2.0], [-2.5, -2.0]])
    want = [[r[i] - np.delete(r, i).mean() for r in reward.T] for i in range(3)]
    np.testing.assert_allclose(rankings.advantage(jnp.asarray(reward), False), want, atol=1e-6)
    gains = np.asarray(rankings.advantage(jnp.asarray(reward)))
    np.testing.assert_allclose(gains[:, 0].std(), 1, rtol=1e-5)
    np.testing.assert_array_equal(gains[:, 1], 0)  # equal rewards teach nothing, and are no NaN


def test_where_the_optimal_ranking_costs_nothing_all_rankings_count_as_one():
    np.testing.assert_array_equal(
        rankings.ratio(jnp.asarray([0.0, 3.0, 3.0]), jnp.asarray([0.0, 0.0, 2.0])), [1, 1, 1.5]
    )


def test_soft_ranks_become_places_as_they_cool():
    score = jnp.asarray([0.5, 2.0, 9.0, -1.0])
    may = np.asarray([True, True, False, True])
    cold = rankings.soft_rank(score, may, 0.01)
    np.testing.assert_allclose(np.asarray(cold)[may], [1, 0, 2], atol=1e-4)
    warm = rankings.soft_rank(score, may, 1.0)
    lead = lambda a, b: 1 / (1 + math.exp(a - b))  # noqa: E731
    np.testing.assert_allclose(warm[0], lead(0.5, 2.0) + lead(0.5, -1.0), rtol=1e-5)
    assert np.abs(jax.grad(lambda s: rankings.soft_rank(s, may, 1.0)[0])(score))[1] > 0.01


def onto_the_permutahedron(z: np.ndarray) -> np.ndarray:
    """The nearest point of the hull of all permutations of 0 ... n - 1, by weights of its corners."""
    corners = np.asarray(list(itertools.permutations(range(len(z)))), float)
    heavy = 1e4  # on the weights' sum, which is 1
    weights, _ = scipy.optimize.nnls(
        np.vstack([corners.T, np.full(len(corners), heavy)]), np.append(z, heavy), maxiter=10_000
    )
    return corners.T @ weights


@pytest.mark.parametrize("temperature", [0.05, 0.5, 2.0])
def test_projected_ranks_are_the_nearest_point_of_the_permutahedron(temperature):
    random = np.random.default_rng(int(10 * temperature))
    for n in (1, 2, 4, 5):
        score = random.standard_normal(n)
        found = rankings.projected_rank(jnp.asarray(score, jnp.float32), np.ones(n, bool), temperature)
        np.testing.assert_allclose(found, onto_the_permutahedron(-score / temperature), atol=2e-3)
    cold = rankings.projected_rank(
        jnp.asarray([0.5, 2.0, 9.0, -1.0]), np.asarray([True, True, False, True]), 0.01
    )
    np.testing.assert_allclose(np.asarray(cold)[[0, 1, 3]], [1, 0, 2], atol=1e-4)


def test_projected_ranks_have_the_slope_of_their_blocks():
    random = np.random.default_rng(2)
    score, may = random.standard_normal((2, 30)), random.random((2, 30)) < 0.8
    aim = random.standard_normal((2, 30))

    def loss(score):
        return (jnp.where(may, rankings.projected_rank(score, may, 0.3), 0.0) * aim).sum()

    slope = np.asarray(jax.grad(loss)(jnp.asarray(score, jnp.float32)))
    assert (slope[~may] == 0).all()
    for at in [(0, 3), (0, 17), (1, 8), (1, 22)]:
        step = np.zeros_like(score)
        step[at] = 1e-3
        ends = [float(loss(jnp.asarray(score + sign * step, jnp.float32))) for sign in (1, -1)]
        np.testing.assert_allclose(slope[at], (ends[0] - ends[1]) / 2e-3, atol=0.1)


def test_each_agent_is_clipped_by_its_own_norm():
    grad = {"w1": jnp.asarray([[[3.0, 4.0]], [[0.3, 0.0]]]), "b1": jnp.asarray([[12.0], [0.4]])}
    clipped, _ = clip_each(5.0).update(grad, None)
    np.testing.assert_allclose(clipped["w1"][0, 0], np.asarray([3, 4]) * 5 / 13, rtol=1e-6)
    np.testing.assert_allclose(clipped["b1"], [[12 * 5 / 13], [0.4]], rtol=1e-6)
    np.testing.assert_array_equal(clipped["w1"][1], grad["w1"][1])


def test_the_schedule_is_the_papers():
    params = {"w_out": jnp.ones((1, 1)), "b1": jnp.ones((1, 1))}
    chosen = optimizer(Rate(weight_decay=0.0), 4000)
    state, rates = chosen.init(params), {}
    step = jax.jit(chosen.update)
    for at in range(160):
        update, state = step(params, state, params)
        rates[at] = -float(update["b1"][0, 0])  # equal gradients: Adam's update is the rate
    np.testing.assert_allclose([rates[0], rates[50], rates[100]], [5e-7, 2.525e-5, 5e-5], rtol=1e-2)
    assert rates[159] < rates[100]
