"""LagKV against float64 NumPy: partitions, the scale of their successors, ranks, and who goes last."""

from __future__ import annotations

import jax
import numpy as np
import prompt_rows as rows
import pytest
from policy_oracle import best, judge, kept, observe

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.policies.lagkv import LagKV


def share(x: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[lag] of one partition [lag, H], in the scale of the next."""
    low, high = after.min(axis=0), after.max(axis=0)
    deviation = np.std((x - low) / (high - low), axis=1, ddof=1)
    e = np.exp(deviation - deviation.max())
    return e / e.sum()


def order(row: int, head: int, lag: int, sinks: int) -> list[int]:
    """Positions of a KV head, the last to go first: sinks, tail from its newest on, then rank by rank."""
    length = rows.LENGTHS[row]
    parts = max(length - sinks, 0) // lag
    ranked: list[tuple[int, int]] = []
    for p in range(parts - 1):
        at, after = (slice(sinks + i * lag, sinks + (i + 1) * lag) for i in (p, p + 1))
        both = [share(x[row, head, at], x[row, head, after]) for x in (rows.KEYS, rows.VALUES)]
        score = np.mean(both, axis=0)
        assert np.diff(np.sort(score)).min() > 1e-6
        ranked += [(rank, at.start + i) for rank, i in enumerate(np.argsort(-score))]
    tail = sinks + max(parts - 1, 0) * lag
    first = range(min(sinks, length))
    return [*first, *reversed(range(tail, length)), *(p for _, p in sorted(ranked))]


@pytest.mark.parametrize(("lag", "sinks", "amount"), [(7, 4, 3), (7, 4, 11), (7, 4, 0.6), (4, 0, 16)])
def test_partitions_share_a_target_and_the_tail_goes_last(lag, sinks, amount):
    policy = Policy(eviction=LagKV(lag, sinks=sinks), budget=Uniform(amount))
    for padding in (9.0, np.nan):
        bits = judge(policy, rows.prompts(padding))
        for row, length in enumerate(rows.LENGTHS):
            target = rows.target_of(amount, length)
            for h in range(rows.K):
                assert kept(bits[row, h]) == sorted(order(row, h, lag, sinks)[:target])


@pytest.mark.parametrize(("lag", "sinks", "amount"), [(7, 4, 14), (4, 0, 0.5)])
def test_shares_rank_across_partitions(lag, sinks, amount):
    policy = Policy(eviction=LagKV(lag, sinks=sinks, cross=True), budget=Uniform(amount))
    bits = judge(policy, rows.prompts())
    for row, length in enumerate(rows.LENGTHS):
        parts = max(length - sinks, 0) // lag
        for h in range(rows.K):
            score = np.full(length, 2.0)
            tail = sinks + max(parts - 1, 0) * lag
            score[tail:] += np.arange(length - tail)
            score[:sinks] = np.inf
            for start in range(sinks, tail, lag):
                at, after = slice(start, start + lag), slice(start + lag, start + 2 * lag)
                both = [share(x[row, h, at], x[row, h, after]) for x in (rows.KEYS, rows.VALUES)]
                score[at] = np.mean(both, axis=0)
            assert kept(bits[row, h]) == best(score, length, rows.target_of(amount, length))
    assert (
        judge(Policy(eviction=LagKV(lag, sinks=sinks), budget=Uniform(amount)), rows.prompts()) != bits
    ).any()


def test_every_partition_keeps_the_same_share():
    # 40 tokens: 4 sinks, five partitions of 7, one more token; the tail is the fifth and that one.
    bits = judge(Policy(eviction=LagKV(7), budget=Uniform(4 + 8 + 4 * 3 + 2)), rows.prompts())
    per_partition = bits[0, :, 4:32].reshape(rows.K, 4, 7).sum(axis=-1)
    assert per_partition.tolist() == [[4, 4, 3, 3]] * 2
    assert bits[0, :, :4].all()
    assert bits[0, :, 32:].all()


def test_without_two_partitions_it_is_sinks_and_the_newest():
    assert rows.LENGTHS[0] < 4 + 2 * 20
    bits = judge(Policy(eviction=LagKV(20), budget=Uniform(9)), rows.prompts())
    assert kept(bits[0, 0]) == [0, 1, 2, 3, 35, 36, 37, 38, 39]


def test_published_defaults_at_a_quarter_keep_sinks_and_the_most_recent():
    # kvpress's case: 512 tokens of which 4 are sinks and 252 are tail; 128 stay.
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, 1, 1, 512, 4))
    bits = judge(Policy(eviction=LagKV(), budget=Uniform(0.25)), observe((512,), 512, k=k, v=v))
    assert kept(bits[0, 0]) == [0, 1, 2, 3, *range(388, 512)]


def test_a_channel_without_range_counts_as_zero():
    random = np.random.default_rng(1)
    k = random.standard_normal((1, 1, 8, 3))
    k[0, 0, 4:, 1] = 5
    actual = jax.jit(LagKV(4, sinks=0).score_prompt)(None, observe((8,), 8, k=k, v=k))[0, 0, :4]
    low, high = k[0, 0, 4:].min(axis=0), k[0, 0, 4:].max(axis=0)
    scaled = (k[0, 0, :4] - low) / np.where(high > low, high - low, np.inf)
    np.testing.assert_array_equal(np.argsort(-actual), np.argsort(-np.std(scaled, axis=1, ddof=1)))


def test_equal_tokens_of_a_partition_keep_the_lowest_positions():
    k = np.ones((1, 1, 8, 3))
    k[0, 0, 4:] = np.random.default_rng(2).standard_normal((4, 3))
    bits = judge(Policy(eviction=LagKV(4, sinks=0), budget=Uniform(6)), observe((8,), 8, k=k, v=k))
    assert kept(bits[0, 0]) == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("call", [{"lag": 1}, {"lag": 2.5}, {"sinks": -1}])
def test_what_is_no_number_of_tokens_is_refused(call):
    with pytest.raises(PolicyError):
        LagKV(**call)
