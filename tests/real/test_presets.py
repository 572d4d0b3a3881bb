"""Every preset of the catalogue runs on the real model."""

from __future__ import annotations

import numpy as np
import pytest
from real_prompts import BOOK

import kvjax
from kvjax import metrics
from kvjax.catalogue import PRESETS

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPT, NEW = 600, 8


@pytest.mark.parametrize("name", [*PRESETS])
def test_a_preset_runs(smollm2, name):
    policy = kvjax.policy(name)
    weights = {part.place: part.untrained(smollm2, 0) for part in policy.learned}
    prompt = smollm2.text.encode(BOOK, bos=False)[:PROMPT]
    done = kvjax.generate(smollm2, policy, [prompt], max_new_tokens=NEW, stops=(), weights=weights)
    assert len(done.tokens[0]) == NEW
    live = np.asarray(metrics.live_slots(done.state))
    seen = PROMPT + NEW - 1
    assert (live >= 1).all()
    assert (live <= seen).all()
    if policy.budget.limited:
        assert live.mean() < seen
