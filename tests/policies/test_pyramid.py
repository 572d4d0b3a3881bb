"""Pyramid's targets against exact fractions and the authors' formula: a line, its mean kept, flattened."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import frame, judge, kept, observe

import kvjax
from kvjax.algebra import Policy, PolicyError
from kvjax.budgets.pyramid import Pyramid
from kvjax.policies.snapkv import SnapKV

HALF = Fraction(1, 2)


def targets_of(budget: Pyramid, seen: list[int], layers: int, protected: int = 0) -> np.ndarray:
    """[layers, B]"""
    at = [dataclasses.replace(frame(l, layers), protected=protected) for l in range(layers)]
    rows = [budget.targets(where, jnp.asarray(seen), None) for where in at]
    return np.concatenate(rows, axis=1).T


def line(mean: Fraction, slope: Fraction, seen: int, layers: int) -> list[Fraction]:
    """mean * (hi - (hi - lo) l / (L - 1)), lo = 1 / slope, hi = 2 - lo; no layer above what was seen."""
    lo, hi = mean / slope, 2 * mean - mean / slope
    if hi > seen:
        hi, lo = Fraction(seen), 2 * mean - seen
    if mean >= seen or layers == 1:
        hi = lo = mean
    return [hi - (hi - lo) * Fraction(l, max(layers - 1, 1)) for l in range(layers)]


def test_the_papers_shape_by_hand():
    assert targets_of(Pyramid(256, slope=4.0), [1024], 4)[:, 0].tolist() == [448, 320, 192, 64]
    assert targets_of(Pyramid(0.5), [64], 5)[:, 0].tolist() == [48, 40, 32, 24, 16]
    assert targets_of(Pyramid(100, slope=1.0), [400], 3)[:, 0].tolist() == [100, 100, 100]
    assert targets_of(Pyramid(100), [400], 1)[:, 0].tolist() == [100]


@pytest.mark.parametrize("layers", [1, 2, 5, 28])
@pytest.mark.parametrize("slope", [1.0, 2.0, 8.0, 20.0])
@pytest.mark.parametrize("amount", [32, 64, 0.25, 0.5, 1.0])
def test_targets_are_the_rounded_line(amount, slope, layers):
    seen = [5, 31, 33, 40, 100, 1000, 4097]
    targets = targets_of(Pyramid(amount, slope=slope), seen, layers)
    assert targets.dtype == np.int32
    for b, n in enumerate(seen):
        mean = Fraction(amount) if isinstance(amount, int) else Fraction(amount) * n
        right = line(mean, Fraction(slope), n, layers)
        for l in range(layers):
            # A half may fall either way by float32's last bit; anything else is exact.
            up = math.floor(right[l] + HALF)
            down = up - 1 if right[l] + HALF == up else up
            assert targets[l, b] in (up, down), (n, l, right[l])
        assert abs(targets[:, b].sum() - mean * layers) <= Fraction(layers, 2)
        assert (np.diff(targets[:, b]) <= 0).all()
        if mean <= n:
            assert (targets[:, b] <= n).all()


def authors(total: Fraction, t: int, layers: int, beta: int, w: int) -> list[int]:
    """Slots a layer by the authors' formula: kvpress 0.5.5, ``PyramidKVPress.get_layer_budget``."""
    low = total / beta
    high = total * 2 - low
    if high >= t - w:
        high, low = Fraction(t - w), total * 2 - (t - w)
    if not t >= high >= low >= w:
        return [round(total)] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


@pytest.mark.parametrize("layers", [4, 5, 32])
@pytest.mark.parametrize("beta", [2, 20])
@pytest.mark.parametrize("window", [0, 16, 64])
def test_targets_are_the_authors_budgets(layers, beta, window):
    seen, fell = [65, 100, 512, 1000, 4096, 10001], 0
    for kept_share in (Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)):
        budget = Pyramid(float(kept_share), slope=beta)
        targets = targets_of(budget, seen, layers, window)
        for row, t in enumerate(seen):
            right = authors(kept_share * t, t, layers, beta, window)
            fell += len(set(right)) > 1
            assert targets[:, row].tolist() == right, (kept_share, t)
            at = dataclasses.replace(frame(0, layers), protected=window)
            assert budget.smallest(at, t) == min(right)
    assert fell >= 6, "the formula fell back everywhere"


def test_the_case_on_record():
    """512 tokens, 4 layers, a window of 64, slope 20, half kept; a quarter falls back to the mean."""
    assert targets_of(Pyramid(0.5, slope=20.0), [512], 4, 64)[:, 0].tolist() == [448, 320, 192, 64]
    assert targets_of(Pyramid(0.25, slope=20.0), [512], 4, 64)[:, 0].tolist() == [128] * 4


@pytest.mark.parametrize(
    ("slope", "layer", "most"), [(20.0, 0, 24), (20.0, 2, 24), (2.0, 0, 36), (2.0, 2, 12)]
)
def test_the_authors_slope_is_served_beside_a_window(slope, layer, most):
    """``lo`` = 1 of 24 is below the window of 8: all layers keep 24."""
    keys = np.random.default_rng(0).standard_normal((1, 1, 60, 4))
    seen = observe((60,), 60, index=layer, layers=3, q=keys, k=keys, v=keys)
    policy = Policy(eviction=SnapKV(8), budget=Pyramid(24, slope=slope))
    assert len(kept(judge(policy, seen)[0, 0])) == most


def test_a_mean_below_what_is_protected_is_still_refused():
    assert repr(kvjax.policy("snapkv(20) + pyramid(39, slope=20)")) == "snapkv(20) + pyramid(39, slope=20)"
    with pytest.raises(
        PolicyError, match=r"pyramid\(39, slope=20\) leaves a KV head 39 slots, fewer than the 40"
    ):
        kvjax.policy("snapkv(40) + pyramid(39, slope=20)")


def test_halves_go_to_the_even():
    # Mean 2.5 in every layer; 10 and 5 around 7.5.
    assert targets_of(Pyramid(0.5, slope=1.0), [5], 2)[:, 0].tolist() == [2, 2]
    assert targets_of(Pyramid(0.25, slope=1.5), [30], 3)[:, 0].tolist() == [10, 8, 5]


def test_short_prompts_flatten_the_line_around_its_mean():
    targets = targets_of(Pyramid(40, slope=4.0), [200, 60, 44, 40, 12], 3)
    assert targets.T.tolist() == [[70, 40, 10], [60, 40, 20], [44, 40, 36], [40, 40, 40], [40, 40, 40]]


def test_a_traced_layer_gives_the_same():
    budget = Pyramid(0.3, slope=3.0)
    traced = jax.jit(lambda l: budget.targets(frame(l, 6), jnp.asarray([77]), None))
    assert [int(traced(l)[0, 0]) for l in range(6)] == targets_of(budget, [77], 6)[:, 0].tolist()


def test_least_and_most_bound_the_targets():
    for amount, slope in ((32, 2.0), (33, 3.0), (7, 20.0)):
        budget = Pyramid(amount, slope=slope)
        targets = targets_of(budget, [1000], 9)[:, 0]
        assert (budget.least, budget.most) == (targets.min(), targets.max())
    assert Pyramid(0.5).least is None
    assert Pyramid(0.5).most is None


def test_bytes_are_shared_over_layers_and_heads():
    # 8 KiB over 4 layers, 2 heads, 32 bytes a slot: a mean of 32 slots.
    targets = [
        int(Pyramid("8KiB").targets(frame(l, 4, 2, 32), jnp.asarray([900]), None)[0, 0]) for l in range(4)
    ]
    assert targets == [48, 37, 27, 16]


@pytest.mark.parametrize("call", [{"slope": 0.5}, {"amount": 0}, {"amount": "8MB"}, {"when": "now"}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError):
        Pyramid(**call)
