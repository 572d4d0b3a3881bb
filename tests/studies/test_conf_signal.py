"""What confidence tells of a cache, against plain loops, and on signals whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from studies.conf_kv import signal


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_autocorrelation_and_horizons_are_those_of_plain_loops(rng):
    sure, tight, loose = rng.random((3, 3, 40))
    facts = signal.foretold(sure, tight, loose)
    d = sure - sure.mean()
    pairs = [d[w, i] * d[w, i + 4] for w in range(3) for i in range(36)]
    assert facts["autocorrelation"]["4"] == pytest.approx(np.mean(pairs) / (d * d).mean())
    assert facts["gain"] == pytest.approx((tight - loose).mean())
    assert set(facts["gain_correlation"]) == {"1", "4", "16"}
    at = [(w, i) for w in range(3) for i in range(40 - 3)]
    next_four = [(tight - loose)[w, i : i + 4].mean() for w, i in at]
    r, low, high = facts["gain_correlation"]["4"]
    assert r == pytest.approx(np.corrcoef([sure[w, i] for w, i in at], next_four)[0, 1])
    assert low <= r <= high


def test_confidence_that_foretells_the_gain_is_seen(rng):
    gain = rng.random((4, 64))
    r, _, _ = signal.foretold(1 - gain, 2 + gain, np.full((4, 64), 2.0))["gain_correlation"]["1"]
    assert r == pytest.approx(-1)


def test_the_inverse_gives_the_least_sure_the_smallest_and_keeps_all_targets():
    targets, sure = np.asarray([64, 128, 64, 128]), np.asarray([0.9, 0.1, 0.8, 0.4])
    np.testing.assert_array_equal(signal.inverse(targets, sure), [128, 64, 128, 64])
