"""What knows the needle admits the needle's tokens and nothing else, and needs little to find it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eval import tasks
from kvjax.eval.measure import runner
from kvjax.eval.tasks.data import Data
from studies.wg_kv import oracle


@dataclasses.dataclass
class Seen:
    pos: np.ndarray


def test_what_is_needed_is_admitted_to_the_heads_named():
    rng = np.random.default_rng(0)
    keep = rng.random((2, 3, 9)) < 0.5
    pos = np.asarray([[4, 5, 6], [7, 8, 9]])
    got = oracle.Told(window=4).admit({"keep": jnp.asarray(keep)}, Seen(jnp.asarray(pos)))
    want = [[[p < 9 and keep[b, k, min(p, 8)] for p in pos[b]] for k in range(3)] for b in range(2)]
    np.testing.assert_array_equal(got, want)


def test_weights_are_the_samples_needed_tokens():
    model = kvjax.load()
    samples = runner.draw(tasks.tasks()[oracle.TASK], model, Data(None), length=512, seed=0, count=2)
    heads = np.asarray([[True, False], [False, False]])
    first, second = (layer["keep"] for layer in oracle.kept(samples, heads)["admission"])
    for row, (_, encoded) in enumerate(samples):
        np.testing.assert_array_equal(first[row, 0, : len(encoded.needed)], encoded.needed)
        assert encoded.needed.sum() > 3
    assert not first[:, 1].any()
    assert not second.any()


@pytest.mark.slow
def test_with_the_sentence_the_needle_is_found_and_without_it_is_not():
    model = kvjax.load()
    samples = runner.draw(tasks.tasks()[oracle.TASK], model, Data(None), length=512, seed=0, count=4)
    sizes = {"length": 512, "window": 32, "sinks": 4}
    every = np.ones((6, 4), bool)
    have, lack = (oracle.measured(model, samples, heads, **sizes) for heads in (every, ~every))
    assert have["found"] >= 0.75 > 0.25 >= lack["found"]
    assert lack["live"] < have["live"] < 0.2
