"""FP8 pages against NumPy's e4m3 (ml_dtypes): codes, scales and errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, append, contents, entry, room

import kvjax
from kvjax.algebra import PolicyError
from kvjax.cache.pages import Pages
from kvjax.models import decoder
from kvjax.storage.fp8 import Fp8

FP8 = Fp8(recent=1)
H, SIZE, T = 32, 64, 128
GAUSS = np.random.default_rng(0).standard_normal((2, 1, 2, T, H)).astype(np.float32)


def put(pages: Pages, k: np.ndarray, v: np.ndarray, first: int = 0) -> Pages:
    return append(pages, FP8, ALL, entry(k, v, first=first), jnp.zeros(k.shape[:3], jnp.int32))


def floats(words: np.ndarray) -> np.ndarray:
    """Channel c in the low byte of word c, channel c + H / 2 in the high byte."""
    both = np.concatenate([words & 255, words >> 8], axis=-1).astype(np.uint8)
    return both.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def test_codes_at_once_are_numpys_and_off_by_a_fortieth():
    pages = put(room(1, 2, H, entries=2, size=SIZE, codec=FP8), *GAUSS)
    assert (pages.k.dtype, pages.k.shape) == (jnp.uint16, (5, SIZE, H // 2))
    for h in range(2):
        for at in range(2):
            page = int(pages.table[0, h, 0, at])
            for i, stored in enumerate((pages.k, pages.v)):
                x = GAUSS[i, 0, h, at * SIZE : (at + 1) * SIZE]
                scale = np.asarray(pages.scales[page, i])
                np.testing.assert_array_equal(scale, 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=0) / 448)))
                # The compiler of jax 0.7 rounds to 16 bits first.
                once = np.float16 if jax.__version_info__ < (0, 8) else np.float32
                right = (x / scale).astype(once).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
                np.testing.assert_array_equal(floats(np.asarray(stored[page])), right)
        for i, y in enumerate(contents(pages, 0, h, FP8)[1:]):
            error = np.linalg.norm(y - GAUSS[i, 0, h]) / np.linalg.norm(GAUSS[i, 0, h])
            print(f"FP8: {error:.2%}")
            assert 0.02 < error < 0.03


def test_a_scale_that_grows_loses_nothing_but_the_smallest():
    """Powers of two: values above the smallest normal float keep their bits."""
    once = put(room(1, 2, H, entries=2, size=SIZE, codec=FP8), *GAUSS)
    grown = room(1, 2, H, entries=2, size=SIZE, codec=FP8)
    for i in range(T):
        grown = put(grown, *GAUSS[:, :, :, i : i + 1], first=i)
    for h in range(2):
        a, b = contents(once, 0, h, FP8), contents(grown, 0, h, FP8)
        np.testing.assert_array_equal(a[1], b[1])
        np.testing.assert_array_equal(a[2], b[2])


def test_scales_by_hand():
    k = np.array([[448, 0, 449, -0.4375], [896, 1, 0, 0.5]], np.float32)[None, None]
    pages, seen = room(1, 1, 4, entries=1, size=4, codec=FP8), []
    for i in range(2):
        pages = put(pages, k[:, :, i : i + 1], -k[:, :, i : i + 1], first=i)
        seen.append(pages.scales[int(pages.table[0, 0, 0, 0]), 0].tolist())
    assert seen == [[1, 0, 2, 2**-10], [2, 2**-8, 2, 2**-9]]
    assert contents(pages, 0, 0, FP8)[1].tolist() == [[448, 0, 448, -0.4375], [896, 1, 0, 0.5]]


def test_refusals():
    for recent in (0, -1, 2.0):
        with pytest.raises(PolicyError, match="fp8.*not a valid number of tokens"):
            Fp8(recent=recent)
    whole = tiny.model()
    odd = tiny.Tiny(decoder.Decoder(dataclasses.replace(whole.network.spec, head_dim=7)), whole.params)
    with pytest.raises(PolicyError, match=r"fp8\(8\) stores two channels in a word.*have 7.*Use int8"):
        kvjax.prefill(odd, kvjax.policy("fp8(8)"), [tiny.prompt(20)], context=64)
