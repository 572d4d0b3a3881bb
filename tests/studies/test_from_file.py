"""The study of a context in a file: its model finds what it should, and both ways of opening answer alike."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import hosted as hosting
from studies import from_file

TOKENS = 1500


def test_the_constructed_model_says_what_followed_a_name():
    ids, facts = from_file.prompt(TOKENS)
    assert len(facts) == from_file.NAMES
    model = from_file.lookup(TOKENS + 64)
    state, _ = kvjax.prefill(model, "full", [ids], context=TOKENS + 64)
    rows = kvjax.fork(state, 0, len(facts))
    _, logits = kvjax.extend(model, "full", rows, [[name] for name in facts])
    assert np.argmax(logits, axis=-1).tolist() == [*facts.values()]
    sure = np.sort(np.asarray(logits / jnp.abs(logits).max()), axis=-1)
    assert (sure[:, -2] < 0.1).all(), "another word is nearly as good"


@pytest.mark.skipif(bool(hosting.absent()), reason=hosting.absent())
def test_both_ways_of_opening_answer_alike(monkeypatch, tmp_path):
    monkeypatch.setattr(
        from_file, "POLICY", "quest(chunks=4, chunk=16, dense=0, recent=64) + host(cache=0.1)"
    )
    monkeypatch.setattr(from_file, "CHUNK", 512)
    made = from_file.written(tmp_path / "state", TOKENS)
    assert made["bytes"] == (tmp_path / "state").stat().st_size
    there, here = (from_file.asked(tmp_path / "state", TOKENS, host) for host in from_file.OPENED.values())
    for one in (there, here):
        assert one["right"] == from_file.NAMES
        assert one["asked"] > one["hits"] > 0
    assert (there["asked"], there["hits"]) == (here["asked"], here["hits"])
    text = from_file.page({"tokens": TOKENS, "made": made, "file": there, "memory": here})
    assert "8 of 8" in text
