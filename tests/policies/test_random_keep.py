"""Random eviction: draws that know nothing of the batch, uniform, and as many survivors as asked."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import best, judge, kept, observe

from kvjax.algebra import Observation, Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies.random_keep import Random

HEADS = 2


def draws(pos: np.ndarray, *, seed: int = 0, index: int = 0, total: int = 99) -> np.ndarray:
    """[B, K, T] for tokens at any positions."""
    seen = Observation(
        pos=jnp.asarray(pos, jnp.int32),
        total=jnp.full(len(pos), total),
        layer=index,
        layers=4,
        values={"k": jnp.zeros((len(pos), HEADS, pos.shape[1], 1))},
    )
    return np.asarray(Random(seed).arrive(None, seen)["draw"])


WHOLE = draws(np.arange(1500)[None])


def test_a_draw_depends_on_position_alone_not_on_row_chunk_or_length():
    shuffled = np.random.default_rng(0).permutation(1500).reshape(3, 500)
    actual = draws(shuffled, total=7)
    for b in range(3):
        np.testing.assert_array_equal(actual[b], WHOLE[0][:, shuffled[b]])


def test_seed_layer_and_head_each_change_the_draws():
    pos = np.arange(1500)[None]
    sequences = [WHOLE[0, 0], WHOLE[0, 1], draws(pos, seed=1)[0, 0], draws(pos, index=1)[0, 0]]
    sequences += [draws(pos, seed=1, index=1)[0, 0], draws(pos, seed=2**32 - 1)[0, 0]]
    near = np.corrcoef(sequences) - np.eye(len(sequences))
    assert np.abs(near).max() < 0.1  # 1500 draws: independent ones stay below 4 / sqrt(1500)


def test_a_traced_layer_draws_the_same():
    np.testing.assert_array_equal(
        draws(np.arange(9)[None], index=jnp.asarray(2)), draws(np.arange(9)[None], index=2)
    )


def test_draws_are_uniform():
    for x in WHOLE[0]:
        n = len(x)
        assert 0 <= x.min() < x.max() < 1
        assert len(np.unique(x)) > n - 5
        assert abs(x.mean() - 0.5) < 4 / np.sqrt(12 * n)
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
        steps = np.abs(np.sort(x) - (np.arange(n) + 0.5) / n).max() + 0.5 / n
        assert steps < 1.95 / np.sqrt(n)
        assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.1  # neighbours


def test_survivors_are_the_largest_draws_of_each_row():
    lengths = (40, 23, 1)
    keys = np.zeros((3, HEADS, 40, 1))
    policy = Policy(eviction=Random(), budget=Uniform(0.5), sinks=2, recent=3)
    bits = judge(policy, observe(lengths, 40, layers=4, k=keys))
    for b, length in enumerate(lengths):
        for h in range(HEADS):
            right = best(WHOLE[0, h], length, int(length / 2 + 0.5), sinks=2, newest=3)
            assert kept(bits[b, h]) == right
    assert bits[0].sum(axis=-1).tolist() == [20, 20]
    assert kept(bits[0, 0]) != kept(bits[0, 1])


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(PolicyError, match="is not a valid seed"):
        Random(seed)
