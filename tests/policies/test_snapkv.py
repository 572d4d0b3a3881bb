"""SnapKV against float64 NumPy: who votes, what a vote is, how it is smoothed, who stays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import best, contents, judge, kept, observe, room

from kvjax import layer as layers
from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.budgets.pyramid import Pyramid
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.policies.snapkv import SnapKV

LENGTHS, T, N, K, H = (40, 25, 6, 3), 40, 4, 2, 8
WINDOW = 6
random = np.random.default_rng(0)
# Large queries and keys: peaked attention, so that two scores are never nearly the same. Padding is
# full of keys that everybody would look at.
Q = 1.5 * random.standard_normal((4, N, T, H))
KEYS = 1.5 * random.standard_normal((4, K, T, H))
for row, end in enumerate(LENGTHS):
    KEYS[row, :, end:] = 9
    Q[row, :, end:] = 9
SEEN = observe(LENGTHS, T, q=Q, k=KEYS, v=KEYS)
REAL = (np.arange(T) < np.array(LENGTHS)[:, None])[:, None, :, None]
NOTHING = {
    "q": np.where(REAL, Q, np.nan),
    "k": np.where(REAL, KEYS, np.nan),
    "v": np.where(REAL, KEYS, np.nan),
}


def attention(q: np.ndarray, keys: np.ndarray, length: int, window: int, cap: float) -> np.ndarray:
    """[voters, length] of one query head: softmax over all keys up to the query's own."""
    rows = []
    for i in range(max(length - window, 0), length):
        s = keys[: i + 1] @ q[i] / np.sqrt(H)
        s = s if cap == np.inf else cap * np.tanh(s / cap)
        e = np.exp(s - s.max())
        rows.append(np.pad(e / e.sum(), (0, length - i - 1)))
    return np.stack(rows)


def scores(row: int, window: int, kernel: int, cap: float = np.inf) -> np.ndarray:
    """[K, length]: zeros inside the window, votes of older tokens smoothed before heads are averaged."""
    length = LENGTHS[row]
    old = max(length - window, 0)
    groups: list[list[np.ndarray]] = [[] for _ in range(K)]
    for n in range(N):
        votes = attention(Q[row, n], KEYS[row, n // (N // K)], length, window, cap).mean(axis=0)[:old]
        smooth = np.zeros(length)
        for t in range(length):
            near = [votes[j] for j in range(t - kernel // 2, t + kernel // 2 + 1) if 0 <= j < old]
            smooth[t] = sum(near) / kernel  # missing neighbours count as zeros
        groups[n // (N // K)].append(smooth)
    return np.stack([np.mean(heads, axis=0) for heads in groups])


@pytest.mark.parametrize(("window", "kernel", "cap"), [(WINDOW, 5, None), (1, 3, None), (11, 7, 1.5)])
def test_votes_smoothing_and_group_mean(window, kernel, cap):
    seen = dataclasses.replace(SEEN, softcap=cap)
    actual = np.asarray(jax.jit(SnapKV(window, kernel=kernel).score_prompt)(None, seen))
    for row, length in enumerate(LENGTHS):
        right = scores(row, window, kernel, cap or np.inf)
        # Beyond the old tokens a score is never compared (the window is protected).
        old = max(length - window, 0)
        np.testing.assert_allclose(actual[row, :, :old], right[:, :old], rtol=2e-5, atol=1e-7)


def test_smoothing_divides_by_the_kernel_at_both_ends():
    # Equal keys: query i gives each of its i + 1 keys 1 / (i + 1).
    same = observe((12,), 12, q=np.ones((1, 1, 12, 2)), k=np.ones((1, 1, 12, 2)), v=np.ones((1, 1, 12, 2)))
    actual = np.asarray(SnapKV(2, kernel=5).score_prompt(None, same))[0, 0]
    each = (1 / 11 + 1 / 12) / 2
    neighbours = np.array([3, 4, 5, 5, 5, 5, 5, 5, 4, 3])
    np.testing.assert_allclose(actual[:10], each * neighbours / 5, rtol=1e-6)


def gap(score: np.ndarray, target: int) -> float:
    """How far the last that stays is from the first that goes."""
    ordered = np.sort(score)[::-1]
    return np.inf if target >= len(ordered) or target < 1 else ordered[target - 1] - ordered[target]


@pytest.mark.parametrize(("amount", "sinks"), [(6, 0), (9, 2), (20, 2), (0.1, 2), (0.5, 0)])
def test_uniform_keeps_exactly_the_best_and_the_window(amount, sinks):
    policy = Policy(eviction=SnapKV(WINDOW), budget=Uniform(amount), sinks=sinks)
    bits = judge(policy, SEEN)
    np.testing.assert_array_equal(bits, judge(policy, observe(LENGTHS, T, **NOTHING)))
    for row, length in enumerate(LENGTHS):
        target = amount if isinstance(amount, int) else int(np.floor(amount * length + 0.5))
        for h, score in enumerate(scores(row, WINDOW, 5)):
            assert gap(score[sinks : max(length - WINDOW, 0)], target - sinks - WINDOW) > 1e-6
            assert kept(bits[row, h]) == best(score, length, target, sinks=sinks, newest=WINDOW)


@pytest.mark.parametrize(("layer", "amount"), [(0, 14), (1, 14), (2, 14), (2, 0.2)])
def test_pyramid_keeps_more_below_and_never_less_than_the_window(layer, amount):
    seen = observe(LENGTHS, T, index=layer, layers=3, q=Q, k=KEYS, v=KEYS)
    bits = judge(Policy(eviction=SnapKV(WINDOW), budget=Pyramid(amount)), seen)
    for row, length in enumerate(LENGTHS):
        mean = amount if isinstance(amount, int) else amount * length
        spread = min(mean / 2, length - WINDOW - mean)
        spread = spread if mean - spread >= WINDOW and spread >= 0 else 0
        target = round(mean + (1 - layer) * spread)
        assert amount == 14 or spread == 0, "the line did not fall back to its mean"
        for h, score in enumerate(scores(row, WINDOW, 5)):
            assert kept(bits[row, h]) == best(score, length, target, newest=WINDOW)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_ada_shares_a_layer_between_its_heads(floor):
    bits = judge(Policy(eviction=SnapKV(WINDOW), budget=Ada(12, floor=floor)), SEEN)
    for row, length in enumerate(LENGTHS):
        # The window first, then each head's own best up to its floor, then the layer's best.
        all_scores = scores(row, WINDOW, 5)
        ranked = []
        for h, score in enumerate(all_scores):
            order = sorted(range(length), key=lambda p: (p < length - WINDOW, -score[p], p))
            sure = set(order[: int(12 * floor)]) | set(range(max(length - WINDOW, 0), length))
            ranked += [((p not in sure), -score[p], h, p) for p in range(length)]
        chosen = {(h, p) for _, _, h, p in sorted(ranked)[: 12 * K]}
        for h in range(K):
            assert kept(bits[row, h]) == sorted(p for head, p in chosen if head == h)
    if floor == 0:
        assert bits[0, 0].sum() != bits[0, 1].sum()


def test_equal_votes_keep_the_lowest_positions_and_ends_count_for_less():
    ones = np.ones((1, 2, 16, 3))
    seen = observe((16,), 16, q=ones, k=ones[:, :1], v=ones[:, :1])
    for kernel, first in ((1, 0), (5, 2)):
        bits = judge(Policy(eviction=SnapKV(4, kernel=kernel), budget=Uniform(9)), seen)
        assert kept(bits[0, 0]) == [*range(first, first + 5), 12, 13, 14, 15]


def test_survivors_keep_their_own_positions_keys_and_values():
    policy = Policy(eviction=SnapKV(WINDOW), budget=Uniform(12), sinks=2)
    bits = judge(policy, SEEN)
    k, v = np.float32(KEYS), np.float32(-KEYS)
    new = Entry(k=k, v=v, pos=SEEN.pos, admit=bits, meta={})
    ring = rings.empty(len(LENGTHS), K, policy.window(T), H, jnp.dtype(jnp.float32))
    cache = LayerCache(ring=ring, pages=room(len(LENGTHS), K, H, entries=5), summary=None)

    @jax.jit
    def pack(cache: LayerCache, new: Entry, total: jax.Array) -> LayerCache:
        return layers.store(layers.LayerInfo(policy, {}, 0, 1, None, total), cache, new, total)

    packed = pack(cache, new, SEEN.total)
    for row, length in enumerate(LENGTHS):
        for h in range(K):
            pos, keys, values = contents(packed.pages, row, h)
            assert sorted(pos.tolist()) == [p for p in kept(bits[row, h]) if p < length - WINDOW]
            np.testing.assert_array_equal(keys, k[row, h, pos])
            np.testing.assert_array_equal(values, v[row, h, pos])
            for p in range(max(length - WINDOW, 0), length):
                np.testing.assert_array_equal(packed.ring.k[row, h, p % WINDOW], k[row, h, p])


@pytest.mark.parametrize("call", [{"window": 0}, {"kernel": 4}, {"kernel": 0}, {"window": 2.5}])
def test_a_window_or_kernel_that_is_none_is_refused(call):
    with pytest.raises(PolicyError):
        SnapKV(**call)
