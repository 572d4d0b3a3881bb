"""The Mosaic GPU bodies of prefill, interpreted: tests that ``test_mosaic_gpu_prefill`` runs in a process of
their own, since XLA makes its pool of threads once.

The interpreter's warpgroups are threads that wait for each other at barriers, and XLA may run each of them on
its pool: on two cores the third would wait for ever.

    NPROC=16 pytest tests/kernels/prefill_on_hopper.py
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_oracle import blockwise as oracle
from test_kernel_blockwise import case as ring
from test_kernel_vertical_slash import case as prompt

from pallas_kernels import blockwise, vertical_slash
from pallas_kernels.blockwise import mosaic_gpu as full
from pallas_kernels.blockwise.work import BlockwiseSizes
from pallas_kernels.dispatch import interpreted
from pallas_kernels.gated.work import SelfAttentionSizes
from pallas_kernels.tuning import Blocks
from pallas_kernels.vertical_slash import mosaic_gpu as slash

RING = BlockwiseSizes(B=2, N=4, K=2, T=70, S=200, H=64)
"""Two blocks of 128 queries a KV head, one of them nearly all padding; four tiles of keys."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Rings of two buffers go round, and races are looked for."""
    assert int(os.environ.get("NPROC", "0")) > 4, "see above"
    for body in (full, slash):
        monkeypatch.setattr(body, "BLOCKS", Blocks(k=64, stages=2))
    full.blockwise.clear_cache()
    slash.vertical_slash.clear_cache()
    with interpreted():
        yield


def check(actual, wanted, v, dtype=jnp.float32):
    """(out, lse) against the oracle's (out, lse, p): weights are rounded to 16 bits, nothing else is."""
    out, lse, p = wanted
    v = np.repeat(np.nan_to_num(np.asarray(v, np.float64)), p.shape[1] // v.shape[1], axis=1)
    plain = np.asarray(jnp.asarray(p, jnp.bfloat16), np.float64) @ v
    plain = np.asarray(jnp.asarray(plain, dtype), np.float64)
    assert_as_good_as_plain(actual[0], plain, out, p.shape[3])
    assert_close(actual[1], lse, p.shape[3])
    assert (actual[0].dtype, actual[1].dtype) == (dtype, jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"T": 20}, {}),  # one reader
        ({}, {"window": 7, "admitted": 0.05}),
        ({"H": 128, "S": 300}, {"window": 70, "softcap": 2.0}),
    ],
    ids=["few", "admitted", "window"],
)
def test_a_ring_in_any_order(sizes, options):
    """NaN in padded keys and values; a query that is padding."""
    options = dict(options)
    arrays, where = ring(RING._replace(**sizes), dtype=jnp.bfloat16, admitted=options.pop("admitted", 0.0))
    actual = blockwise(*arrays, **where, **options, impl="mosaic_gpu")
    check(actual, oracle(*arrays, **where, **options), arrays[2])
    np.testing.assert_array_equal(actual[0][0, :, 0], 0)
    np.testing.assert_array_equal(actual[1][0, :, 0], -np.inf)


def causal(h=64):
    """Rows of 200 and of no tokens, in order; NaN past their ends."""
    (q, k, v, _), _ = prompt(
        SelfAttentionSizes(B=2, N=2, K=1, T=200, H=h, window=0), lengths=np.array([200, 0])
    )
    pos = jnp.asarray(np.stack([np.arange(200), np.full(200, -1)]), jnp.int32)
    return [x.astype(jnp.bfloat16) for x in (q, k, v)], {"q_pos": pos, "k_pos": pos}


def test_a_prompt_and_an_empty_row():
    arrays, where = causal()
    actual = blockwise(*arrays, **where, impl="mosaic_gpu")
    check(actual, oracle(*arrays, **where), arrays[2])
    np.testing.assert_array_equal(actual[0][1], 0)
    np.testing.assert_array_equal(actual[1][1], -np.inf)


def test_a_nan_that_is_seen_reaches_who_sees_it_and_nobody_else():
    """In a key; in tiles that are seen whole and at the edge."""
    (q, k, v), where = causal()
    out, lse = blockwise(q, k.at[0, 0, 70, 3].set(jnp.nan), v, **where, impl="mosaic_gpu")
    sees = np.broadcast_to((np.arange(200) >= 70) & (np.arange(2) == 0)[:, None, None], lse.shape)
    np.testing.assert_array_equal(np.isnan(lse), sees)
    np.testing.assert_array_equal(np.isnan(out).all(axis=3), sees)
    np.testing.assert_array_equal(np.isnan(out).any(axis=3), sees)


def test_gradients_are_those_of_xla():
    arrays, where = ring(RING._replace(B=1, N=2, K=1, T=5, S=60), dtype=jnp.bfloat16)

    def gradients(impl):
        (out, lse), back = jax.vjp(lambda *x: blockwise(*x, **where, impl=impl), *arrays)
        return back((jnp.cos(out), jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0)))

    for ours, theirs in zip(gradients("mosaic_gpu"), gradients("xla"), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), atol=0.02)
        assert np.abs(np.float32(theirs)).max() > 0.1


@pytest.mark.parametrize(
    ("sizes", "lengths", "admitted"),
    [
        ({"window": 140}, [300, 130], (0.9, 0.02)),
        ({"window": 20, "H": 128}, [257, 0], (0.9, 1.0)),
        ({"window": 0}, [300, 64], (0.5, 0.0)),
    ],
    ids=["wide", "narrow", "none"],
)
def test_packed_keys_and_a_band(sizes, lengths, admitted):
    shape = SelfAttentionSizes(B=2, N=2, K=2, T=300, H=64, window=0)._replace(**sizes)
    arrays, ends = prompt(shape, dtype=jnp.bfloat16, lengths=np.array(lengths), admitted=admitted)
    actual = vertical_slash(*arrays, window=shape.window, lengths=ends, softcap=2.0, impl="mosaic_gpu")
    pos = np.where(np.arange(300) < np.asarray(ends)[:, None], np.arange(300), -1)
    wanted = oracle(*arrays[:3], q_pos=pos, k_pos=pos, window=shape.window, admit=arrays[3], softcap=2.0)
    check(actual, wanted, arrays[2])


def test_a_piece_of_a_prompt():
    """At the start, inside and over the end of rows; out in the model's dtype."""
    shape = SelfAttentionSizes(B=3, N=2, K=1, T=300, H=64, window=50)
    lengths, start = np.array([300, 250, 250]), np.array([0, 150, 37])
    (q, k, v, admit), ends = prompt(shape, dtype=jnp.bfloat16, lengths=lengths, admitted=(0.6,))
    at = start[:, None] + np.arange(140)
    piece = jnp.take_along_axis(q, jnp.asarray(at)[:, None, :, None], axis=2)
    options = {"window": 50, "lengths": ends, "offset": jnp.asarray(start), "dtype": jnp.bfloat16}
    actual = vertical_slash(piece, k, v, admit, **options, impl="mosaic_gpu")
    near, own = np.where(at < lengths[:, None], at, -1), np.arange(300)
    own = np.where(own < lengths[:, None], own, -1)
    wanted = oracle(piece, k, v, q_pos=near, k_pos=own, window=50, admit=admit)
    check(actual, wanted, v, jnp.bfloat16)


def test_keys_that_do_not_fit_are_said_loudly():
    """Two KV heads, of which the first admits too many."""
    shape = SelfAttentionSizes(B=1, N=4, K=2, T=100, H=64, window=5)
    arrays, _ = prompt(shape, dtype=jnp.bfloat16, lengths=np.array([100]), admitted=(1.0, 0.0))
    out, lse, admitted = vertical_slash(*arrays, window=5, capacity=60, impl="mosaic_gpu")
    np.testing.assert_array_equal(admitted, [[100, 0]])
    np.testing.assert_array_equal(np.isnan(lse).all(axis=2), [[True, True, False, False]])
    assert np.isfinite(out[:, 2:]).all()
