"""Bytes: allocated is what the device gave, live is counted by hand from what a row holds."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

import kvjax
from kvjax import metrics
from kvjax.models.decoder import Decoder

H = 8
LENGTHS = (40, 21)


def read(spec):
    policy = kvjax.policy(spec)
    return tiny.read(policy, [tiny.prompt(n, n) for n in LENGTHS], 16, pages=48)[0]


def test_allocated_is_every_leaf_once():
    state = read("int8(8)")
    size = kvjax.nbytes(state)
    leaves = sum(x.nbytes for x in jax.tree.leaves(state.layers))
    assert size.allocated.sum() == leaves == metrics.allocated(state.layers)
    ring = 2 * 2 * 8 * (2 * H * 4 + 1)  # rows, heads, slots, (k and v in float32, an admission bit)
    assert size.allocated[0, 0] == ring
    assert size.total["allocated"] == leaves


def test_live_bytes_of_a_full_ring():
    size = kvjax.nbytes(read("full"))
    assert size.live.shape == (2, 2, 4)
    assert (size.live[..., 0] == sum(LENGTHS) * (2 * H * 4 + 1)).all()
    assert (size.live[..., 1:] == 0).all()


def test_live_bytes_of_int8_pages():
    size = kvjax.nbytes(read("int8(8)"))
    slots = [n - 8 for n in LENGTHS]
    pages = sum(-(-n // tiny.PAGE) for n in slots)
    by_hand = sum(slots) * (2 * H * 1 + 4) + pages * (2 * H * 4)  # codes and position; scales of a page
    assert (size.live[..., 1] == by_hand).all()
    assert (size.live[..., 0] == 2 * 8 * (2 * H * 4 + 1)).all()


@pytest.mark.slow
def test_live_bytes_of_metadata_and_summaries():
    size = kvjax.nbytes(read("quest(3, chunk=4, dense=1, recent=8)"))
    slots = [n - 8 for n in LENGTHS]
    pages = sum(-(-n // tiny.PAGE) for n in slots)
    assert (size.live[..., 1] == sum(slots) * (2 * H * 4 + 4) + pages * 2 * 2 * H * 4).all()
    kept = kvjax.nbytes(read("knorm + uniform(20, when=every_step) + recent(4)"))
    assert (kept.live[..., 0] == 2 * 4 * (2 * H * 4 + 1 + 4)).all()
    assert (kept.live[..., 1] == 2 * 16 * (2 * H * 4 + 4 + 4)).all()


def test_peak_never_falls_and_covers_what_is_held():
    state, _ = kvjax.prefill(
        tiny.model(), kvjax.policy("snapkv(8) + uniform(12)"), [tiny.prompt(60)], context=64, page=tiny.PAGE
    )
    now = kvjax.nbytes(state)
    # While a layer is judged, its whole prompt is there: keys and values of 60 tokens at least.
    assert now.peak[1] >= now.total["allocated"] + 60 * 2 * 2 * H * 4 / 2
    assert now.peak[0] >= now.total["live"]
    low = metrics.raise_peak(state, 1.0, 1.0)
    assert kvjax.nbytes(low).peak == now.peak


def test_full_bytes_is_keys_and_values():
    network: Decoder = tiny.model().network
    assert metrics.full_bytes(network, 10, np.float32) == 10 * 2 * 2 * 2 * H * 4
    assert metrics.full_bytes(network, 10, "bfloat16") == 10 * 2 * 2 * 2 * H * 2
