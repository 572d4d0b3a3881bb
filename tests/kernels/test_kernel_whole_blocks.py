"""Blocks that are seen whole take a path without masks: which they are, and what it answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_bodies import BODIES, body, check_no_race
from kernel_numerics import assert_close
from kernel_oracle import blockwise as dense
from kernel_sizes import SELF_ATTENTION
from test_kernel_vertical_slash import case, exact, tiled

from pallas_kernels.blockwise import block_lists
from pallas_kernels.blockwise.sight import Sight, Where
from pallas_kernels.vertical_slash import mosaic_tpu as slash
from pallas_kernels.vertical_slash.compact import Inputs, Rows, admitted_upto, compact, older
from pallas_kernels.vertical_slash.tiles import Rule


@pytest.mark.parametrize("window", [0, 1, 5])
def test_packed_keys_that_some_and_all_of_a_block_see(window):
    """By counting, block by block: a piece that begins anywhere, rows that end in it, and too little room."""
    t, size, ends, starts = 60, 8, np.array([60, 41]), np.array([3, 20])
    admit = np.random.default_rng(0).random((2, 1, t)) < 0.6
    upto = admitted_upto(jnp.asarray(admit), jnp.asarray(ends))
    counts = older(upto, Rows(jnp.asarray(starts), jnp.asarray(ends)), 5, size, window, 25)
    for row, block in np.ndindex(2, 5):
        i, at = starts[row] + block * size + np.arange(size), np.flatnonzero(admit[row, 0, : ends[row]])
        count = [min(25, int((at <= x - window).sum())) for x in i if x < ends[row]]
        assert int(counts.some[row, 0, block]) == max(count, default=0)
        assert int(counts.whole[row, 0, block]) == (count[0] if len(count) == size else 0)


@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("window", [0, 1, 100, 320])
def test_a_program_reads_every_visible_pair_once_and_hides_nothing_of_whole_blocks(window, first):
    """By counting pairs; rows that end at, inside and before blocks of 64 queries and 32 keys; a piece."""
    t, bq, bk, ends = 320, 64, 32, jnp.asarray([320, 301, 64, 0], jnp.int32)
    admit = np.random.default_rng(0).random((4, 1, t)) < np.array([0.9, 0.5, 0.9, 0.9])[:, None, None]
    nothing, rows = jnp.zeros((4, 1, t, 1)), Rows(jnp.full(4, first), ends)
    upto = admitted_upto(jnp.asarray(admit), ends)
    pos = compact(nothing, nothing, upto, t).pos
    counts = older(upto, rows, t // bq, bq, window, t)
    sizes = slash.SlashSizes(4, 1, 1, t, t, 1, t, bq, bk, Rule(window, t, 1.0, None), False, False)

    @jax.jit
    def order(start, length, some, whole):
        blocks = slash.block_order(sizes, start, length, some, whole)
        return blocks.wholes, blocks.steps, blocks.block(jnp.arange(2 * t // bk))

    j, inside, outside = np.arange(t), 0, 0
    for row, block in np.ndindex(4, t // bq):
        i, length = first + block * bq + np.arange(bq)[:, None], int(ends[row])
        wholes, steps, (packed, at) = order(
            first + block * bq, ends[row], *(x[row, 0, block] for x in (counts.some, counts.whole))
        )
        times = np.zeros((bq, t), int)
        for c in range(int(steps)):
            part = slice(int(at[c]) * bk, (int(at[c]) + 1) * bk)
            keys = np.asarray(pos)[row, 0, part] if packed[c] else j[part]
            see = (keys <= i - window) if packed[c] else (keys > i - window) & (keys <= i)
            see &= i < length
            assert see.all() == (c < int(wholes))
            times[:, keys[keys < t]] += see[:, keys < t]
        inside, outside = inside + int(wholes), outside + int(steps) - int(wholes)
        wanted = (j <= i) & ((i - j < window) | admit[row]) & (i < length)
        np.testing.assert_array_equal(times, wanted)
    assert min(inside, outside) > 0


@pytest.mark.parametrize("impl", BODIES)
def test_vertical_slash_of_whole_blocks(impl):
    """Packed and (TPU) own ones; a NaN in a key that is seen there reaches who sees it, and nobody else."""
    t, window, bq, bk = (650, 300, 128, 128) if impl == "mosaic_tpu" else (150, 30, 16, 32)
    shape = SELF_ATTENTION["g1_h32"]._replace(B=1, N=2, K=1, T=t, window=window)
    (q, k, v, admit), lengths = case(shape, lengths=np.array([t - 3]), admitted=(0.8,))
    admit = admit.at[:, :, 5].set(True)
    rows = Rows(jnp.zeros_like(lengths), lengths)
    counts = older(admitted_upto(admit, lengths), rows, t // bq, bq, window, t)
    assert int(jnp.max(counts.whole)) >= bk
    rule = Rule(window, t, shape.H**-0.5, None)
    wanted = exact(q, k, v, admit, lengths, window)
    out, lse, _ = tiled(impl)(Inputs(q, k, v, admit, lengths), rule=rule)
    assert_close(out, wanted[0], t)
    assert_close(lse, wanted[1], t)
    check_no_race(impl)
    out, lse, _ = tiled(impl)(Inputs(q, k.at[:, :, 5].set(jnp.nan), v, admit, lengths), rule=rule)
    sees = (np.arange(t) >= 5) & (np.arange(t) < t - 3)
    np.testing.assert_array_equal(np.isnan(out).all(axis=3), np.broadcast_to(sees, lse.shape))
    np.testing.assert_array_equal(np.isnan(lse), np.broadcast_to(sees, lse.shape))


def places(kind):
    """(q_pos, k_pos, admit, window) of 40 queries and 128 keys: in a run, of a padded row, in disorder."""
    rng = np.random.default_rng(1)
    q_pos, k_pos = np.tile(np.arange(100, 140), (3, 1)), np.tile(np.arange(128), (3, 1))
    q_pos[1, 30:], k_pos[1, 120:] = -1, -1
    k_pos[2] = rng.permutation(128)
    admit = rng.random((3, 2, 128)) < 0.5
    admit[:, 1, :64] = True
    return q_pos, k_pos, *{"all": (None, None), "window": (None, 90), "admitted": (admit, 40)}[kind]


@pytest.mark.parametrize("kind", ["all", "window", "admitted"])
def test_pairs_of_blocks_that_are_seen_whole_are_those_without_a_hidden_pair(kind):
    q_pos, k_pos, admit, window = places(kind)
    q, k = jnp.zeros((3, 2, 40, 8)), jnp.zeros((3, 2, 128, 8))
    where = Where(*(None if x is None else jnp.asarray(x) for x in (q_pos, k_pos, admit)))
    rows = block_lists.rows(q, k, where, window, 8, 16, folded=True)
    whole = np.asarray(block_lists.all_visible(rows, window, 8, 16))
    i, j = q_pos[:, None, :, None], k_pos[:, None, None, :]
    see = (i >= 0) & (j >= 0) & (j <= i)
    if window is not None:
        see = see & ((i - j < window) if admit is None else (i - j < window) | admit[:, :, None, :])
    truth = see.reshape(3, -1, 5, 8, 8, 16).all(axis=(3, 5))
    assert not np.any(whole & ~truth)
    # A block that is near in part and admitted in part counts as an edge.
    assert whole.sum() == truth.sum() if admit is None else 0 < whole.sum() <= truth.sum()
    lists = block_lists.lists_of(block_lists.any_visible(rows, window, 8, 16), jnp.asarray(whole))
    met = np.asarray(block_lists.any_visible(rows, window, 8, 16))
    for at in np.ndindex(lists.length.shape):
        order, first, count = lists.order[at], int(lists.whole[at]), int(lists.length[at])
        np.testing.assert_array_equal(order[:first], np.flatnonzero(whole[at]))
        np.testing.assert_array_equal(np.sort(order[:count]), np.flatnonzero(met[at]))


def test_one_block_of_queries_reads_a_few_keys_without_lists(monkeypatch):
    """Whatever positions are; with more keys, or more queries, it has their lists."""
    q_pos, k_pos, admit, window = places("admitted")
    where = Where(*(jnp.asarray(x) for x in (q_pos[:, :4], k_pos, admit)))
    keys, queries = jnp.zeros((3, 2, 128, 8)), [jnp.zeros((3, 4, n, 8)) for n in (4, 5)]
    one, two = (block_lists.rows(q, keys, where, window, 8, 16, folded=True) for q in queries)
    lists = block_lists.of_read(one, window, 8, 16)
    np.testing.assert_array_equal(lists.order, np.broadcast_to(np.arange(8), (3, 1, 1, 8)))
    assert np.all(lists.length == 8)
    assert not np.any(lists.whole)
    listed = block_lists.lists_of(
        block_lists.any_visible(two, window, 8, 16), block_lists.all_visible(two, window, 8, 16)
    )
    jax.tree.map(np.testing.assert_array_equal, block_lists.of_read(two, window, 8, 16), listed)
    monkeypatch.setattr(block_lists, "FEW", 127)
    assert not np.all(block_lists.of_read(one, window, 8, 16).length == 8)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("kind", ["all", pytest.param("admitted", marks=pytest.mark.slow)])
def test_blockwise_of_whole_blocks(impl, kind):
    """NaN in padded keys and values, which may be no part of a whole block."""
    q_pos, k_pos, admit, window = places(kind)
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, 4, 40, 32)), *rng.normal(size=(2, 3, 2, 128, 32))
    k, v = (np.where((k_pos < 0)[:, None, :, None], np.nan, x) for x in (k, v))
    sight = Sight(window, 32**-0.5, None)
    where = Where(*(None if x is None else jnp.asarray(x) for x in (q_pos, k_pos, admit)))
    run = body(
        "blockwise", impl, "blockwise", blocks=(16, 32) if impl == "triton" else (16, 128), sight=sight
    )
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    out, lse = run(*arrays, where)
    wanted = dense(
        *(np.nan_to_num(x) for x in (q, k, v)), q_pos=q_pos, k_pos=k_pos, window=window, admit=admit
    )
    assert_close(out, wanted[0], 128)
    assert_close(lse, wanted[1], 128)
    check_no_race(impl)
