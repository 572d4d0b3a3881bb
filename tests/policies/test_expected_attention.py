"""Expected attention against float64 NumPy: Gaussian queries, mean rotation ahead, share times norm."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import prompt_rows as rows
import pytest
import tiny
from policy_oracle import best, judge, kept

from kvjax import layer
from kvjax.algebra import Observation, Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.uniform import Uniform
from kvjax.models.rope import Rope, rotate
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.types import Heads

THETA = 30.0
# Queries with a strong mean, as trained models have them; the rows' keys are taken as already turned.
BEFORE = rows.Q + 2 * np.random.default_rng(5).standard_normal((1, rows.N, 1, rows.H))
TURN = functools.partial(rotate, rope=Rope(theta=THETA))


def prompts(padding: float = 9.0, turn=TURN) -> Observation:
    return dataclasses.replace(rows.prompts(padding, q_pre=BEFORE), rotate=turn)


def rotation(position: int) -> np.ndarray:
    """[H, H] that turns a column: pair (i, i + H / 2) by position * THETA ** (-2 i / H)."""
    half = rows.H // 2
    angle = position * THETA ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def scores(
    row: int,
    ahead: int,
    sinks: int,
    floor: float = 0.0,
    turned: bool = True,
    spreads: float = 1.0,
    stored=None,
) -> np.ndarray:
    """[K, length]; infinite for the sinks. ``stored``: mean and covariance in place of the prompt's own."""
    length = rows.LENGTHS[row]
    result = np.full((rows.K, length), np.inf)
    if length <= sinks:
        return result
    r = np.mean([rotation(length + i) for i in range(ahead)], axis=0) if turned else np.eye(rows.H)
    for h in range(rows.K):
        keys = rows.KEYS[row, h, sinks:length]
        shares = []
        for n in range(h * rows.G, (h + 1) * rows.G):
            q = BEFORE[row, n, sinks:length]
            own = q.mean(axis=0), np.cov(q.T, bias=True)
            mean, spread = (
                own if stored is None else (np.float64(stored[x][n]) for x in ("mean", "covariance"))
            )
            mean, spread = r @ mean, spreads * r @ spread @ r.T
            s = keys @ mean / np.sqrt(rows.H) + np.array([k @ spread @ k for k in keys]) / (2 * rows.H)
            shares.append(np.exp(s - s.max()) / np.exp(s - s.max()).sum())
        norm = np.sqrt((rows.VALUES[row, h, sinks:length] ** 2).sum(-1))
        result[h, sinks:] = (np.mean(shares, axis=0) + floor) * norm
    return result


@pytest.mark.parametrize(("ahead", "sinks", "floor", "turn"), [(64, 4, 0.0, TURN), (5, 0, 0.02, None)])
def test_score_is_expected_share_times_value_norm(ahead, sinks, floor, turn):
    eviction = ExpectedAttention(ahead, sinks=sinks, floor=floor)
    actual = np.asarray(jax.jit(functools.partial(eviction.score_prompt, None))(prompts(turn=turn)))
    for row, length in enumerate(rows.LENGTHS):
        right = scores(row, ahead, sinks, floor, turned=turn is not None)
        first = min(sinks, length)
        np.testing.assert_allclose(actual[row, :, first:length], right[:, first:], rtol=3e-4, atol=1e-7)
        assert (actual[row, :, :first] > actual[row, :, first:length].max(initial=0)).all()


@pytest.mark.parametrize(("covariance", "stored"), [(False, False), (True, True), (False, True)])
def test_without_covariance_and_with_stored_statistics(covariance, stored):
    eviction = ExpectedAttention(64, covariance=covariance, stored=stored)
    assert eviction.learns == ("expected_attention" if stored else "")
    network = types.SimpleNamespace(num_heads=rows.N, num_layers=1, head_dim=rows.H)
    params = eviction.example_weights(jax.random.key(2), network)[0] if stored else None
    actual = np.asarray(jax.jit(eviction.score_prompt)(params, prompts()))
    for row, length in enumerate(rows.LENGTHS):
        right = scores(row, 64, 4, spreads=float(covariance), stored=params)
        np.testing.assert_allclose(actual[row, :, 4:length], right[:, 4:], rtol=3e-4, atol=1e-7)
    with pytest.raises(PolicyError, match="has no statistics"):
        ExpectedAttention(stored=True).score_prompt(None, prompts())


@pytest.mark.parametrize(("amount", "sinks"), [(2, 4), (11, 4), (0.5, 0)])
def test_the_best_stay_behind_the_sinks(amount, sinks):
    policy = Policy(eviction=ExpectedAttention(64, sinks=sinks), budget=Uniform(amount))
    for padding in (9.0, np.nan):
        bits = judge(policy, prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            target = rows.target_of(amount, length)
            for h, score in enumerate(scores(row, 64, sinks)):
                assert rows.gap(score, length, target, min(sinks, length), 0) > 1e-6
                assert kept(bits[row, h]) == best(score, length, target)


@pytest.mark.parametrize("sinks", [1, 3])
def test_sinks_stay_in_every_head_where_heads_share_a_layer(sinks):
    """Values of head 1 are a thousand times longer: its ordinary tokens outscore all of head 0."""
    seen = prompts()
    values = np.array(seen.values["v"])
    values[:, 1] *= 1000
    seen = dataclasses.replace(seen, values=seen.values | {"v": jnp.asarray(values)})
    policy = Policy(eviction=ExpectedAttention(64, sinks=sinks), budget=Ada(8, floor=0.0))
    bits = judge(policy, seen)
    for row, length in enumerate(rows.LENGTHS):
        if length > 16:
            assert bits[row, :, :sinks].all()
            assert kept(bits[row, 0]) == list(range(sinks)), "head 0 keeps more: its scores are not low"


def test_what_turns_is_the_models_own_rotation():
    model, positions = tiny.model(), jnp.asarray([[0, 3, 9, 10, 40]])
    x = np.float32(np.random.default_rng(0).standard_normal((1, 5, model.network.spec.model_dim)))

    def attend(_: int, heads: Heads, carry: None) -> tuple[jax.Array, Heads]:
        return heads.q, heads

    _, heads = model.network.layer(model.params["layers"][0], 0, x, positions, attend, None)
    np.testing.assert_array_equal(heads.rotate(heads.q_pre, positions), heads.q)
    assert np.abs(heads.q - heads.q_pre).max() > 0.1
    seen = layer.observe(layer.LayerInfo(Policy(), {}, 0, 2, None, positions[:, -1]), heads, positions)
    assert seen.rotate is heads.rotate


def test_equal_keys_keep_the_lowest_positions():
    seen = prompts()
    values = {**seen.values, "k": np.ones_like(seen.values["k"]), "v": np.ones_like(seen.values["v"])}
    bits = judge(
        Policy(eviction=ExpectedAttention(64), budget=Uniform(7)), dataclasses.replace(seen, values=values)
    )
    assert kept(bits[0, 0]) == list(range(7))


@pytest.mark.parametrize("call", [{"ahead": 0}, {"ahead": 2.5}, {"sinks": -1}, {"floor": -0.1}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError):
        ExpectedAttention(**call)
