"""AdaKV against plain Python: each head's sure slots first, then the best scores of the whole layer."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import frame, judge, kept, observe

from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.ada import Ada
from kvjax.policies.knorm import KNorm

HEADS, T = 3, 30
random = np.random.default_rng(0)
# Heads on different levels, whole numbers so that there are ties within and between heads.
SCORES = np.round(random.standard_normal((4, HEADS, T)) * 4 + np.array([0, 3, 6])[:, None])
SEEN = np.array([30, 30, 17, 4])
for row, end in enumerate(SEEN):
    SCORES[row, :, end:] = -np.inf
SCORES[1, :, :2] = SCORES[1, :, -3:] = np.inf  # protected


def counts(scores: np.ndarray, mean: int, sure: int) -> list[int]:
    """Slots per head of one row; ties to the lowest head, then the lowest position."""
    heads, t = scores.shape
    order = []
    for h in range(heads):
        ranked = sorted(range(t), key=lambda p: (-scores[h, p], p))
        for rank, p in enumerate(ranked):
            if scores[h, p] > -np.inf:
                first = rank < sure or scores[h, p] == np.inf
                order.append((not first, 0.0 if first else -scores[h, p], h, p))
    chosen = sorted(order)[: mean * heads]
    return [sum(1 for _, _, head, _ in chosen if head == h) for h in range(heads)]


def targets(budget: Ada, scores: np.ndarray = SCORES, seen: np.ndarray = SEEN) -> np.ndarray:
    slots = budget.targets(frame(kv_heads=HEADS), jnp.asarray(seen), jnp.asarray(scores, jnp.float32))
    return np.asarray(slots)


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("amount", [5, 12, 0.25, 0.5, 1.0])
def test_counts_are_those_of_the_layers_best(amount, floor):
    slots = targets(Ada(amount, floor=floor))
    for b, seen in enumerate(SEEN):
        mean = (
            amount if isinstance(amount, int) else math.floor(Fraction(amount) * int(seen) + Fraction(1, 2))
        )
        sure = math.floor(mean * Fraction(str(floor)))
        assert slots[b].tolist() == counts(SCORES[b], mean, sure)
        assert slots[b].sum() == HEADS * min(mean, seen)
        assert (slots[b] >= min(sure, seen)).all()


def test_the_floor_of_every_mean_and_share_is_exact():
    for floor in (0.1, 0.2, 0.6, 0.7):
        for mean in range(1, T):
            # One head outshines the other, which is left with its floor.
            scores = np.stack([np.full(T, 1.0), np.zeros(T)])[None]
            slots = targets(Ada(mean, floor=floor), scores, np.array([T]))[0]
            sure = max(math.floor(mean * Fraction(str(floor))), 2 * mean - T)
            assert slots.tolist() == [2 * mean - sure, sure]


def test_a_head_with_few_admitted_tokens_leaves_its_slots_to_the_others():
    scores = random.standard_normal((1, HEADS, T))
    scores[0, 1, 1:] = -np.inf  # one token was admitted
    slots = targets(Ada(10, floor=0.6), scores, np.array([T]))[0]
    assert slots.tolist() == counts(scores[0], 10, 6)
    assert slots.sum() == 10 * HEADS
    assert slots[1] == 1


def test_what_stays_is_each_heads_best_with_the_protected():
    norms = random.permutation(2 * 24).reshape(2, 24).astype(float) + np.array([1, 20])[:, None]
    policy = Policy(eviction=KNorm(), budget=Ada(10, floor=0.3), sinks=2, recent=3)
    bits = judge(policy, observe((24,), 24, k=norms[None, ..., None]))[0]
    score = -norms
    score[:, :2] = score[:, -3:] = np.inf
    right = counts(score, 10, 3)
    assert sum(right) == 20
    assert right[0] > right[1] >= 5
    for h in range(2):
        assert kept(bits[h]) == sorted(np.argsort(-score[h], kind="stable")[: right[h]].tolist())


@pytest.mark.slow
def test_more_protected_than_the_mean_keeps_the_protected_alone():
    keys = random.standard_normal((1, 2, 20, 3))
    policy = Policy(eviction=KNorm(), budget=Ada(0.1), sinks=4, recent=4)
    bits = judge(policy, observe((20,), 20, k=keys))[0]
    assert [kept(x) for x in bits] == [[0, 1, 2, 3, 16, 17, 18, 19]] * 2


@pytest.mark.parametrize("call", [{"floor": 1.5}, {"floor": -0.1}, {"amount": 0}, {"amount": 1.5}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError):
        Ada(**call)
