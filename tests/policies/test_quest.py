"""Quest against NumPy: bounds no key exceeds, the chunks with the best of them, ranges kept up to date."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import NATIVE, append, contents, entry, remove, room
from tiny import owned_once

from kvjax import layer
from kvjax.algebra import Picked, Policy, PolicyError
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.state import LayerCache
from kvjax.policies.quest import Quest
from kvjax.storage.int8 import Int8
from kvjax.types import EMPTY

ROWS, N, K, H, SIZE, CHUNK, ENTRIES = 2, 4, 2, 6, 8, 4, 4
PER, G = SIZE // CHUNK, N // K
QUEST = Quest(chunks=3, chunk=CHUNK, dense=1, recent=2)
random = np.random.default_rng(0)
T = 27
KEYS, VALUES = random.standard_normal((2, ROWS, K, T, H))
QUERIES = random.standard_normal((5, ROWS, N, H)).astype(np.float32)
# Streams of 27, 14, 5 and 0 tokens: a full list, one that ends in a chunk, few chunks, none.
WHICH = np.where(np.arange(T) < np.array([[27, 14], [5, 0]])[..., None], 0, EMPTY)


def filled(codec=NATIVE) -> Pages:
    pages = room(ROWS, K, H, entries=ENTRIES, size=SIZE, codec=codec, chooser=QUEST)
    return append(pages, codec, QUEST, entry(KEYS, VALUES), jnp.asarray(WHICH))


PAGES = jax.device_get(filled())
ROW_HEADS = [(b, h) for b in range(ROWS) for h in range(K)]


def chunks(pages: Pages, b: int, h: int, codec=NATIVE) -> list[np.ndarray]:
    """Keys of the KV head's chunks, in list order, in float64."""
    keys = contents(pages, b, h, codec)[1].astype(np.float64)
    return [keys[i : i + CHUNK] for i in range(0, len(keys), CHUNK)]


def bounds(q: np.ndarray, pages: Pages, b: int, h: int) -> np.ndarray:
    """For each chunk the largest over the group of sum_h max(q_h lo_h, q_h hi_h)."""
    group = q[b, h * G : (h + 1) * G].astype(np.float64)
    result = [
        max(np.maximum(g * x.min(axis=0), g * x.max(axis=0)).sum() for g in group)
        for x in chunks(pages, b, h)
    ]
    return np.array(result)


@jax.jit
def found_bounds(q: jax.Array, pages: Pages) -> jax.Array:
    return QUEST.worth(q, pages, 0)


@functools.partial(jax.jit, static_argnums=0)
def select(quest: Quest, q: jax.Array, pages: Pages) -> Picked:
    return quest.select(None, q, pages, 0, jnp.asarray([T, T]), T)


def picked(quest: Quest, q: np.ndarray, pages: Pages) -> list[set[int]]:
    """Chunk indices per KV head, after checking that they are well formed."""
    picks = select(quest, q, pages)
    assert picks.unit == CHUNK
    index, sets = np.asarray(picks.entries), []
    for b, h in ROW_HEADS:
        real = [int(c) for c in index[b, h] if c != EMPTY]
        assert len(set(real)) == len(real)
        assert all(c * CHUNK < pages.length[b, h, 0] for c in real)
        sets.append(set(real))
    return sets


def test_bounds_are_numpys_and_no_key_exceeds_them():
    for q in QUERIES:
        actual = np.asarray(found_bounds(q, PAGES))
        for b, h in ROW_HEADS:
            live = chunks(PAGES, b, h)
            np.testing.assert_allclose(
                actual[b, h, : len(live)], bounds(q, PAGES, b, h), rtol=1e-5, atol=1e-5
            )
            assert (actual[b, h, len(live) :] == -np.inf).all()
            for bound, keys in zip(actual[b, h], live):
                assert bound >= (q[b, h * G : (h + 1) * G] @ keys.T).max() - 1e-5


@pytest.mark.parametrize("most", [1, 3, 50])
def test_the_chunks_with_the_best_bounds_are_picked(most):
    quest = Quest(chunks=most, chunk=CHUNK, recent=2)
    for q in QUERIES[:3]:
        for (b, h), chunks in zip(ROW_HEADS, picked(quest, q, PAGES)):
            order = np.argsort(-bounds(q, PAGES, b, h), kind="stable")
            assert chunks == set(order[:most].tolist())


def test_all_chunks_while_there_are_no_more_than_asked():
    sets = picked(Quest(chunks=7, chunk=CHUNK, recent=2), QUERIES[0], PAGES)
    assert sets == [set(range(7)), set(range(4)), set(range(2)), set()]


@pytest.mark.parametrize(("index", "decoding"), [(0, True), (1, True), (1, False)])
def test_a_read_visits_the_picked_chunks_alone(index, decoding):
    policy = Policy(selection=QUEST)
    site = layer.LayerInfo(policy, {}, index, 2, None, jnp.asarray([T, T]), T)
    ring = rings.empty(ROWS, K, 2, H, jnp.dtype(jnp.float32))
    q = QUERIES[0]
    cache = LayerCache(ring=ring, pages=PAGES, summary=None)
    read = jax.jit(lambda cache, q: layer.read_pages(site, cache, q, by=QUEST if decoding else None).partials)
    ((out, lse),) = read(cache, q[:, :, None])
    for b, h in ROW_HEADS:
        _, keys, values = contents(PAGES, b, h)
        best = np.argsort(-bounds(q, PAGES, b, h), kind="stable")[: QUEST.chunks]
        chosen = np.isin(np.arange(len(keys)) // CHUNK, best) | (index == 0) | (not decoding)
        for n in range(h * G, (h + 1) * G):
            s = keys[chosen] @ q[b, n] / np.sqrt(H)
            total = np.logaddexp.reduce(s) if len(s) else -np.inf
            np.testing.assert_allclose(lse[b, n, 0], total, rtol=1e-5)
            np.testing.assert_allclose(out[b, n, 0], np.exp(s - total) @ values[chosen], atol=1e-5)


# --- ranges follow the content -------------------------------------------------------------------


def check_ranges(pages: Pages, codec) -> None:
    """Each page's range is the lowest and highest of its live keys as stored; zeros for empty chunks."""
    owned_once(pages)
    pages = jax.device_get(pages)
    ranges = np.asarray(pages.summary["range"])
    for b, h in ROW_HEADS:
        live = chunks(pages, b, h, codec)
        for c in range(-(-len(live) // PER) * PER):
            page = int(pages.table[b, h, 0, c // PER])
            right = [live[c].min(0), live[c].max(0)] if c < len(live) else np.zeros((2, H))
            np.testing.assert_array_equal(ranges[page, c % PER], np.float32(np.concatenate(right)))


@pytest.mark.parametrize("codec", [NATIVE, Int8(recent=2)])
def test_ranges_are_recomputed_when_tokens_come_and_go(codec):
    pages, draw = filled(codec), np.random.default_rng(1)
    check_ranges(pages, codec)
    for turn in range(24):
        length = np.asarray(pages.length[..., 0])
        if turn % 3 < 2:  # two leave for one that comes, so that pages are given back and taken again
            hit = draw.integers(0, 2**31, length.shape) % np.maximum(length, 1)
            leaves = (draw.random(length.shape) < 0.9) & (length > 0)
            pages = remove(pages, codec, QUEST, jnp.asarray(np.where(leaves, hit, EMPTY)))
        else:
            new = entry(3 * draw.standard_normal((ROWS, K, 1, H)), first=T + turn)
            comes = np.where(draw.random((ROWS, K, 1)) < 0.7, 0, EMPTY)
            pages = append(pages, codec, QUEST, new, jnp.asarray(comes))
        check_ranges(pages, codec)
    assert (np.asarray(pages.length)[:, :, 0] < WHICH.shape[2]).all()


def test_the_extreme_key_leaves_the_range_with_its_token():
    keys = np.ones((ROWS, K, T, H))
    keys[:, :, 2] = 50
    empty = room(ROWS, K, H, entries=ENTRIES, size=SIZE, chooser=QUEST)
    pages = append(empty, NATIVE, QUEST, entry(keys), jnp.zeros(WHICH.shape, jnp.int32))
    assert pages.summary["range"].max() == 50
    pages = remove(pages, NATIVE, QUEST, jnp.full((ROWS, K), 2))
    assert pages.summary["range"].max() == 1


def test_the_first_layers_are_read_whole():
    assert [Quest().applies(i) for i in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("call", [{"chunks": 0}, {"chunk": 0}, {"dense": -1}, {"recent": 0}, {"chunks": 1.5}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(
        PolicyError, match=r"is not a valid number of (chunks|tokens|layers)\. Give a whole number"
    ):
        Quest(**call)


def test_a_chunk_that_does_not_divide_the_page_is_refused():
    with pytest.raises(PolicyError, match="does not divide"):
        Quest(chunk=3).summary_shapes(8, H)
