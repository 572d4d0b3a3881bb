"""The trace of an answer: each step's confidence and live slots follow CONF-KV's rule."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from kvjax.algebra import Policy
from kvjax.budgets.confidence import Confidence
from kvjax.policies.conf_kv import ConfKV
from studies.conf_kv.trace import trace

POLICY = Policy(eviction=ConfKV(recent=6), budget=Confidence(14, 24, threshold=0.5))


@pytest.mark.slow
def test_a_trace_shows_the_sawtooth():
    shown = trace(tiny.model(), POLICY, [tiny.prompt(30, 0), tiny.prompt(33, 1)], max_new_tokens=12)
    assert shown.tokens.shape == shown.confidence.shape == (2, 12)
    assert shown.live.shape == (2, 12, 2)
    most = np.where(shown.confidence[:, :-1] >= 0.5, 14, 24)[..., None]
    np.testing.assert_array_equal(shown.live[:, 1:], np.minimum(shown.live[:, :-1] + 1, most))
    assert trace(tiny.model(), Policy(), [[1, 2]], max_new_tokens=2).confidence is None
