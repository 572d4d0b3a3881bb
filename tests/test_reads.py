"""Token-equivalent reads: the paper's numbers, and what a state says of itself."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import decode, reads
from kvjax.eval.measure.row import Reads
from kvjax.layer._read import _selector_tokens


@pytest.mark.parametrize(
    ("share", "prompt", "n", "topk"),
    [(0.01, 16384, 164, 144), (0.03, 16384, 492, 472), (0.05, 16384, 820, 800), (0.07, 100, 7, None)],
)
def test_selection_alone(share, prompt, n, topk):
    assert reads.budget(share, prompt) == n
    assert reads.retrieved(share, prompt) == topk


@pytest.mark.parametrize(
    ("share", "prompt", "size", "left"),
    [
        (0.01, 16384, (128, 128), 79),
        (0.03, 16384, (64, 64), 439),
        (0.01, 4096, (64, 64), None),  # 41 tokens, and 20 + 33 are spoken for
        (0.02, 4096, (64, 64), 29),
        (0.04, 1024, (16, 32), 12),  # 41 - 20 - 9 (8.5 rounded up)
    ],
)
def test_beside_a_summary_that_is_charged_at_once(share, prompt, size, left):
    features, head_dim = size
    count = reads.retrieved(share, prompt, features=features, head_dim=head_dim)
    assert count == left
    assert reads.written(count) == ("–" if left is None else str(left))


def test_amortised_it_costs_less_and_less():
    size = {"features": 128, "head_dim": 128}
    counts = [reads.retrieved(0.01, 16384, **size, generated=n) for n in (1, 2, 10, 65, 10**6)]
    assert counts == [79, 111, 137, 143, 143]  # floor(144 - 65 / n)
    assert reads.retrieved(0.01, 16384, **size, wide=2) == 144 - 130


def test_a_state_says_what_reading_its_summary_costs():
    model, policy = tiny.model(), kvjax.policy("topk(4, sinks=2, tail=6) + phi(16)")
    state = decode.empty(model.network, policy, rows=3, context=64, dtype=jnp.bfloat16)
    paper, by_bytes = kvjax.nbytes(state).summary_reads
    assert paper == reads.summary(16, 8) == 10
    assert by_bytes == reads.summary(16, 8, wide=2) + 2 / 16  # the count of its tokens: one int32 a stream
    none = decode.empty(model.network, "full", rows=1, context=64, dtype=jnp.bfloat16)
    assert kvjax.nbytes(none).summary_reads == (0, 0)


@pytest.mark.parametrize(
    ("spec", "tokens"),
    # Of 12 tokens every key, half a token each; of two pages two chunks, a low and a high key each.
    [("topk(4, sinks=2, tail=6)", 6), ("quest(3, chunk=4, recent=8)", 4)],
)
def test_what_a_selection_looks_at_is_charged_in_tokens(spec, tokens):
    policy = kvjax.policy(spec)
    state = decode.empty(tiny.model().network, policy, rows=2, context=64, page=8, dtype=jnp.float32)
    layer = state.layers[1]
    pages = dataclasses.replace(layer.pages, length=jnp.full_like(layer.pages.length, 12))
    layer = dataclasses.replace(layer, pages=pages)
    np.testing.assert_array_equal(_selector_tokens(policy, layer), np.full((2, 2), tokens))


def test_a_row_of_results_charges_the_summary_as_one_likes():
    row = Reads(slots=40.0, summary=20.0, selector=500.0, summary_paper=10.0)
    assert [row.equivalent(), row.equivalent(10), row.equivalent(by_bytes=True)] == [50, 41, 60]
    assert dataclasses.asdict(row)["selector"] == 500
