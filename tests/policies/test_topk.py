"""Top-K against NumPy: the best tokens of the middle in place, whole chunks of them, shares exact."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import NATIVE, append, contents, entry, room

import kvjax
from kvjax import layer
from kvjax.algebra import Policy, PolicyError
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.state import LayerCache
from kvjax.policies.topk import TopK, TopKPages, retrieved
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8
from kvjax.types import EMPTY
from pallas_kernels.ragged_decode.api import gathered_decode

ROWS, N, K, H, SIZE, CHUNK, ENTRIES = 2, 4, 2, 6, 8, 4, 4
G, T = N // K, 27
random = np.random.default_rng(0)
KEYS, VALUES = random.standard_normal((2, ROWS, K, T, H))
QUERIES = random.standard_normal((3, ROWS, N, H)).astype(np.float32)
# Streams of 27, 14, 5 and 0 tokens.
WHICH = np.where(np.arange(T) < np.array([[27, 14], [5, 0]])[..., None], 0, EMPTY)
ROW_HEADS = [(b, h) for b in range(ROWS) for h in range(K)]
TOTAL = jnp.asarray([100, 41])
CODECS = {"native": NATIVE, "int8": Int8(recent=2), "int4": Int4(recent=2)}


@functools.cache
def filled(name: str) -> Pages:
    codec = CODECS[name]
    pages = room(ROWS, K, H, entries=ENTRIES, size=SIZE, codec=codec)
    return jax.device_get(append(pages, codec, TopK(), entry(KEYS, VALUES), jnp.asarray(WHICH)))


def scores(q: np.ndarray, keys: np.ndarray, h: int, b: int) -> np.ndarray:
    """Largest product of each key with the group's queries, in float64."""
    return (q[b, h * G : (h + 1) * G].astype(np.float64) @ keys.astype(np.float64).T).max(axis=0)


@functools.partial(jax.jit, static_argnums=0)
def select(part, q, pages):
    return part.select(None, q, pages, 0, TOTAL, 100)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("k", [1, 5, 60, 0.06])
def test_the_tokens_with_the_highest_scores_are_picked(name, k):
    pages, part = filled(name), TopK(k)
    for q in QUERIES:
        picked = select(part, q, pages)
        assert picked.unit == 1
        for b, h in ROW_HEADS:
            tokens = [int(i) for i in np.asarray(picked.entries)[b, h] if i != EMPTY]
            score = scores(q, contents(pages, b, h, CODECS[name])[1], h, b)
            count = k if isinstance(k, int) else math.ceil(k * int(TOTAL[b]))
            assert tokens == np.argsort(-score, kind="stable")[:count].tolist()


@pytest.mark.parametrize("k", [1, 8, 11, 60])
def test_the_chunks_with_the_highest_scores_are_picked(k):
    pages, part = filled("native"), TopKPages(k, chunk=CHUNK)
    for q in QUERIES:
        picked = select(part, q, pages)
        assert picked.unit == CHUNK
        for b, h in ROW_HEADS:
            chunks = [int(i) for i in np.asarray(picked.entries)[b, h] if i != EMPTY]
            score = scores(q, contents(pages, b, h)[1], h, b)
            best = np.array([score[i : i + CHUNK].max() for i in range(0, len(score), CHUNK)])
            assert chunks == np.argsort(-best, kind="stable")[: max(k // CHUNK, 1)].tolist()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("part", [TopK(5), TopKPages(8, chunk=CHUNK)], ids=repr)
def test_a_read_visits_the_picked_alone(part, name):
    pages, codec, q = filled(name), CODECS[name], QUERIES[0]
    site = layer.LayerInfo(Policy(selection=part, storage=codec), {}, 0, 2, None, TOTAL)
    ring = rings.empty(ROWS, K, 2, H, jnp.dtype(jnp.float32))
    cache = LayerCache(ring=ring, pages=pages, summary=None)

    @functools.partial(jax.jit, static_argnums=2)
    def read(cache, q, mass):
        result = layer.read_pages(site, cache, q, by=site.policy.selection, with_mass=mass)
        return result.partials, result.mass

    ((out, lse),), _ = read(cache, q[:, :, None], False)
    (again,), (mass,) = read(cache, q[:, :, None], True)
    np.testing.assert_allclose(again[0], out, atol=1e-6)
    for b, h in ROW_HEADS:
        _, keys, values = contents(pages, b, h, codec)
        score = scores(q, keys, h, b)
        if isinstance(part, TopK):
            chosen = np.isin(np.arange(len(keys)), np.argsort(-score, kind="stable")[:5])
        else:
            best = np.array([score[i : i + CHUNK].max() for i in range(0, len(score), CHUNK)])
            chosen = np.isin(np.arange(len(keys)) // CHUNK, np.argsort(-best, kind="stable")[:2])
        for n in range(h * G, (h + 1) * G):
            s = keys[chosen] @ q[b, n] / np.sqrt(H)
            total = np.logaddexp.reduce(s) if len(s) else -np.inf
            np.testing.assert_allclose(lse[b, n, 0], total, rtol=1e-5)
            np.testing.assert_allclose(out[b, n, 0], np.exp(s - total) @ values[chosen], atol=1e-5)
            received = np.zeros(ENTRIES * SIZE)
            received[: len(keys)][chosen] = np.exp(s - total)
            np.testing.assert_allclose(np.asarray(mass)[b, n, 0].reshape(-1), received, atol=1e-5)


def test_dead_slots_in_hand_may_hold_anything():
    k, v = (random.standard_normal((1, 2, 5, H)).astype(np.float32) for _ in range(2))
    q, live = QUERIES[0][:1, :, None], np.asarray([[[True, False, True, True, False], [False] * 5]])
    spoiled = [np.where(live[..., None], x, np.nan) for x in (k, v)]
    for clean, dirty in zip(gathered_decode(q, k, v, live), gathered_decode(q, *spoiled, live)):
        np.testing.assert_array_equal(clean, dirty)
    assert (np.asarray(gathered_decode(q, k, v, live)[1])[0, 2:] == -np.inf).all()
    with pytest.raises(ValueError, match="gathered_decode"):
        gathered_decode(q, k, v[:, :, :3], live)


@pytest.mark.parametrize(
    ("share", "tokens", "count"),
    [(0.01, 16384, 164), (0.03, 16384, 492), (0.07, 100, 7), (0.29, 100, 29), (1.0, 131072, 131072)],
)
def test_a_share_is_a_ceiling_without_rounding(share, tokens, count):
    assert retrieved(share, tokens) == count
    assert int(retrieved(share, jnp.asarray(tokens))) == count


def test_the_middle_lies_between_the_anchors():
    part = TopK(3, sinks=2, tail=4)
    positions = part.selectable(jnp.arange(16)[None], jnp.asarray([12]))[0]
    assert np.flatnonzero(positions).tolist() == list(range(2, 8))
    assert (TopK().recent, TopK(tail=0).recent) == (16, 1)
    plain, anchored = kvjax.policy("quest").selection, kvjax.policy("quest(sinks=4, tail=16)").selection
    assert (plain.splits, anchored.splits) == (False, True)
    assert bool(plain.selectable(jnp.arange(16)[None], jnp.asarray([12])).all())


@pytest.mark.parametrize("k", [0, -1, 1.5, 0.0, True, "8", float("nan")])
def test_numbers_that_say_no_amount_are_refused(k):
    with pytest.raises(PolicyError, match=r"k=.* is not a valid number of tokens or share"):
        TopK(k)


@pytest.mark.parametrize("call", [{"sinks": -1}, {"tail": -1}, {"dense": -1}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError, match=r"is not a valid number of (tokens|layers)"):
        TopK(**call)


def test_a_chunk_that_does_not_divide_the_page_is_refused():
    with pytest.raises(PolicyError, match="does not divide"):
        TopKPages(8, chunk=3).summary_shapes(8, H)
