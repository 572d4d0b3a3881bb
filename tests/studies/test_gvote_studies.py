"""GVote's studies on the tiny model: what they call kept a prefill keeps, and their numbers hang together."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
from tiny import quick_compiles  # noqa: F401

import kvjax
from kvjax import decode, metrics
from studies.gvote import commands, proxy

TEXT = tiny.prompt(120, 4)
PROMPT = TEXT[: 120 - proxy.FUTURE]
PS, COUNTS = (0.6, 0.9), (1, 3)


@pytest.fixture(scope="module")
def agreement():
    return proxy.agreement_of(tiny.model(), TEXT, ps=PS, counts=COUNTS, ahead=8, seed=5)


def test_what_is_kept_is_what_a_prefill_keeps(agreement):
    # The study's second half sees the prompt's keys alone, as the first half of the text gives them.
    reading = decode.read_full(tiny.model(), [PROMPT], context=128)
    for i, p in enumerate(PS):
        policy = kvjax.policy(f"gvote({p}, samples=3, ahead=8)")
        state, _ = decode.cut(tiny.model(), policy, reading, page=8, seeds=5)
        kept = np.asarray(metrics.present(state))[:, 0, :, : len(PROMPT)].sum(axis=-1)
        voted = agreement.kept[:, :, i, COUNTS.index(3)] * len(PROMPT)
        assert (np.abs(kept - voted) <= 1.01).all()  # the ring holds the newest, named or not
        assert kept.max() > 5


def test_more_voters_and_a_wider_nucleus_hold_more(agreement):
    for values in (agreement.kept, agreement.held):
        assert (np.diff(values, axis=-1) >= -1e-6).all()
        assert (np.diff(values, axis=-2) >= -1e-6).all()
    assert ((agreement.overlap > 0) & (agreement.overlap <= 1 + 1e-5)).all()
    assert ((agreement.usage > 0) & (agreement.usage < 1)).all()
    assert (np.abs(agreement.r) <= 1 + 1e-5).all()


def test_the_picture_is_drawn_from_the_file(agreement, tmp_path):
    pytest.importorskip("matplotlib")
    heads = {n: getattr(agreement, n).tolist() for n in ("overlap", "usage", "r")}
    (tmp_path / "proxy_x_1.json").write_text(json.dumps({"by_layer_and_head": heads}))
    (file,) = commands.draw(tmp_path)
    assert file.stat().st_size > 5_000
