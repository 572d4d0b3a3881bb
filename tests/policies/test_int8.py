"""INT8 pages against NumPy: codes, scales and errors, quantised at once and grown token by token."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import ALL, append, contents, entry, remove, room

from kvjax.algebra import PolicyError
from kvjax.cache.pages import Pages
from kvjax.storage.int8 import Int8
from kvjax.types import EMPTY

INT8 = Int8(recent=1)
H, SIZE, T = 32, 64, 128
GAUSS = np.random.default_rng(0).standard_normal((2, 1, 2, T, H)).astype(np.float32)


def put(
    pages: Pages, k: np.ndarray, v: np.ndarray, first: int = 0, stored: np.ndarray | None = None
) -> Pages:
    which = np.zeros(k.shape[:3], np.int32) if stored is None else np.where(stored, 0, EMPTY)
    return append(pages, INT8, ALL, entry(k, v, first=first), jnp.asarray(which))


@functools.cache
def at_once() -> Pages:
    return put(room(1, 2, H, entries=2, size=SIZE, codec=INT8), *GAUSS)


@functools.cache
def one_by_one() -> Pages:
    pages = room(1, 2, H, entries=2, size=SIZE, codec=INT8)
    for i in range(T):
        pages = put(pages, *GAUSS[:, :, :, i : i + 1], first=i)
    return pages


def errors(pages: Pages) -> list[float]:
    """Relative error of K and of V over all KV heads."""
    kv = [contents(pages, 0, h, INT8)[1:] for h in range(2)]
    assert [contents(pages, 0, h, INT8)[0].tolist() for h in range(2)] == [list(range(T))] * 2
    return [
        float(np.linalg.norm(np.stack([f[i] for f in kv]) - GAUSS[i, 0]) / np.linalg.norm(GAUSS[i, 0]))
        for i in range(2)
    ]


def test_gaussian_quantised_at_once_is_off_by_six_per_mille():
    for error in errors(at_once()):
        print(f"quantised at once: {error:.3%}")
        assert 0.005 < error < 0.008


def test_gaussian_grown_token_by_token_is_off_by_less_than_nine_per_mille():
    for once, grown in zip(errors(at_once()), errors(one_by_one())):
        print(f"grown token by token: {grown:.3%}")
        assert once < grown < 0.009


def test_codes_at_once_are_numpys():
    pages = at_once()
    for h in range(2):
        for entry_ in range(2):
            page = int(pages.table[0, h, 0, entry_])
            for i, codes in enumerate((pages.k, pages.v)):
                x = GAUSS[i, 0, h, entry_ * SIZE : (entry_ + 1) * SIZE]
                scale = np.abs(x).max(axis=0) / np.float32(127)
                np.testing.assert_allclose(pages.scales[page, i], scale, rtol=1e-6)
                exact = x.astype(np.float64) / scale
                assert np.abs(np.asarray(codes[page]) - exact).max() < 0.5 + 1e-4
                assert (np.abs(np.asarray(codes[page], np.int32)).max(axis=0) == 127).all()


def test_grown_scales_are_those_of_the_page_at_once():
    a, b = at_once(), one_by_one()
    for h in range(2):
        for entry_ in range(2):
            page, other = int(a.table[0, h, 0, entry_]), int(b.table[0, h, 0, entry_])
            np.testing.assert_allclose(b.scales[other], a.scales[page], rtol=1e-6)


# --- small pages: two KV heads of up to three pages of four slots, four channels ------------------


def small() -> Pages:
    return room(1, 2, 4, entries=3, size=4, codec=INT8)


def owned(pages: Pages, head: int) -> list[int]:
    return [int(p) for p in np.asarray(pages.table)[0, head, 0] if p != EMPTY]


def test_codes_of_a_page_that_grows_by_hand():
    # One channel per story, scales that are powers of two:
    #   channel 0   127 sets scale 1; 10 is code 10; 254 doubles it: 127 -> 63.5 -> 64 (even), 10 -> 5
    #   channel 1   -127, then 3 and -1 inside the scale: nothing moves
    #   channel 2   0 leaves the scale at zero; 63.5 sets 1/2; 127 doubles it: 127 -> 63.5 -> 64
    #   channel 3   254 sets scale 2; 127 is 63.5 -> 64; -254 leaves the scale alone
    k = np.array([[127, -127, 0, 254], [10, 3, 63.5, 127], [254, -1, 127, -254]], np.float32)
    pages, seen = small(), []
    for i in range(3):
        token = np.stack([k[i : i + 1], k[i : i + 1] * 4])[None]
        pages = put(pages, token, -token, first=i)
        page, four = owned(pages, 0)[0], owned(pages, 1)[0]
        seen.append((pages.scales[page, 0].tolist(), np.asarray(pages.k)[page, : i + 1].tolist()))
        np.testing.assert_array_equal(pages.v[page], -np.asarray(pages.k)[page])
        np.testing.assert_array_equal(pages.k[page], pages.k[four])
        np.testing.assert_array_equal(pages.scales[page] * 4, pages.scales[four])
    assert seen == [
        ([1, 1, 0, 2], [[127, -127, 0, 127]]),
        ([1, 1, 0.5, 2], [[127, -127, 0, 127], [10, 3, 127, 64]]),
        ([2, 1, 1, 2], [[64, -127, 0, 127], [5, 3, 64, 64], [127, -1, 127, -127]]),
    ]
    _, keys, _ = contents(pages, 0, 0, INT8)
    assert keys.tolist() == [[128, -127, 0, 254], [10, 3, 64, 128], [254, -1, 127, -254]]


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_zero_channels_stay_zero_and_finite(at_a_time):
    x = GAUSS[0, :, :, :12, :4].copy()
    x[..., 1] = 0
    pages = small()
    for i in range(0, 12, at_a_time):
        piece = x[:, :, i : i + at_a_time]
        pages = put(pages, piece, np.zeros_like(piece), first=i)
    for h in range(2):
        _, k, v = contents(pages, 0, h, INT8)
        assert (k[:, 1] == 0).all()
        assert (v == 0).all()
        assert np.abs(k - x[0, h]).max() < 0.03
    assert (np.asarray(pages.scales)[:, 0, 1] == 0).all()
    assert (np.asarray(pages.scales)[:, 1] == 0).all()


def test_scales_only_grow_while_owned_and_start_anew_when_taken_again():
    draw, pages = np.random.default_rng(3), small()
    truth: dict[int, np.ndarray] = {}
    anew, largest = 0, np.zeros(4)
    for i in range(60):
        before, old = owned(pages, 0), np.asarray(pages.scales).copy()
        length = int(pages.length[0, 0, 0])
        if length == 12 or (length and draw.random() < 0.45):
            at = int(draw.integers(length))
            del truth[int(contents(pages, 0, 0, INT8)[0][at])]
            pages = remove(pages, INT8, ALL, jnp.asarray([[at, EMPTY]]))
        else:
            x = draw.standard_normal((1, 2, 1, 4)) * 10.0 ** draw.integers(-2, 2)
            truth[i] = x[0, 0, 0]
            pages = put(pages, x, -x, first=i, stored=np.array([[[True], [False]]]))
        now, after = np.asarray(pages.scales), owned(pages, 0)
        for page in set(before) & set(after):
            assert (now[page] >= old[page]).all()
        for page in set(after) - set(before):
            np.testing.assert_allclose(now[page], np.abs(x[0, 0]).repeat(2, 0) / 127, rtol=1e-6)
            anew += bool((old[page] > now[page]).any())
        pos, k, v = contents(pages, 0, 0, INT8)
        assert sorted(pos.tolist()) == sorted(truth)
        np.testing.assert_array_equal(v, -k)
        largest = np.maximum(largest, now[:, 0].max(axis=0))
        for key, p in zip(k, pos.tolist()):
            assert (np.abs(key - truth[p]) <= 2 * largest).all()  # each move or growth: half a step
    assert anew >= 2
    assert not pages.length[0, 1].any()


@pytest.mark.parametrize("tokens", [1, 3])
def test_growing_one_page_leaves_all_others_alone(tokens):
    # One token per KV head touches its page alone; several go over the whole pool.
    x = GAUSS[0, :, :, :9, :4]
    pages = small()
    for i in range(0, 9, 3):
        pages = put(pages, x[:, :, i : i + 3], x[:, :, i : i + 3], first=i)
    grown = owned(pages, 1)[2]
    stored = np.broadcast_to(np.array([[[False], [True]]]), (1, 2, tokens))
    big = np.full((1, 2, tokens, 4), 99.0)
    after = put(pages, big, big, first=9, stored=stored)
    others = [p for p in range(pages.count) if p != grown]
    for name in ("k", "v", "scales"):
        was, now = np.asarray(getattr(pages, name)), np.asarray(getattr(after, name))
        np.testing.assert_array_equal(was[others], now[others])
    np.testing.assert_allclose(after.scales[grown], np.full((2, 4), 99 / 127), rtol=1e-6)


def test_the_recent_tokens_are_a_whole_number():
    for recent in (0, -1, 2.0):
        with pytest.raises(PolicyError, match="not a valid number of tokens"):
            Int8(recent=recent)
    assert Int8().dtype(jnp.dtype(jnp.bfloat16)) == jnp.int8
