"""INT4 pages against NumPy: codes, scales, bytes and errors; and what has no place in two codes a byte."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, append, contents, entry, remove, room

import kvjax
from kvjax.algebra import PolicyError
from kvjax.cache.pages import Pages
from kvjax.models import decoder
from kvjax.storage.int4 import Int4

INT4 = Int4(recent=1)
H, SIZE, T = 32, 64, 128
GAUSS = np.random.default_rng(0).standard_normal((2, 1, 2, T, H)).astype(np.float32)


def put(pages: Pages, k: np.ndarray, v: np.ndarray, first: int = 0) -> Pages:
    return append(pages, INT4, ALL, entry(k, v, first=first), jnp.zeros(k.shape[:3], jnp.int32))


def nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Codes of -8 … 7: channel c in the low half of byte c, channel c + H / 2 in the high half."""
    both = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).astype(np.int32)
    return np.where(both > 7, both - 16, both)


def off(pages: Pages) -> list[float]:
    """Relative error of K and of V over all KV heads."""
    kv = [contents(pages, 0, h, INT4)[1:] for h in range(2)]
    exact = GAUSS[:, 0]
    return [
        float(np.linalg.norm(np.stack([f[i] for f in kv]) - exact[i]) / np.linalg.norm(exact[i]))
        for i in range(2)
    ]


def test_codes_at_once_are_numpys_and_off_by_a_tenth():
    pages = put(room(1, 2, H, entries=2, size=SIZE, codec=INT4), *GAUSS)
    assert pages.k.dtype == jnp.uint8
    assert pages.k.shape == (5, SIZE, H // 2)
    for h in range(2):
        for at in range(2):
            page = int(pages.table[0, h, 0, at])
            for i, stored in enumerate((pages.k, pages.v)):
                x = GAUSS[i, 0, h, at * SIZE : (at + 1) * SIZE]
                scale = np.abs(x).max(axis=0) / np.float32(7)
                np.testing.assert_allclose(pages.scales[page, i], scale, rtol=1e-6)
                codes = nibbles(np.asarray(stored[page]))
                assert np.abs(codes - x.astype(np.float64) / scale).max() < 0.5 + 1e-4
                assert (np.abs(codes).max(axis=0) == 7).all()
    for error in off(pages):
        print(f"INT4, quantised at once: {error:.2%}")
        assert 0.09 < error < 0.13


def test_grown_token_by_token_the_scales_are_the_same_and_the_error_larger():
    once = put(room(1, 2, H, entries=2, size=SIZE, codec=INT4), *GAUSS)
    grown = room(1, 2, H, entries=2, size=SIZE, codec=INT4)
    for i in range(T):
        grown = put(grown, *GAUSS[:, :, :, i : i + 1], first=i)
    for h in range(2):
        for at in range(2):
            a, b = (int(p.table[0, h, 0, at]) for p in (once, grown))
            np.testing.assert_allclose(grown.scales[b], once.scales[a], rtol=1e-6)
    for error, less in zip(off(grown), off(once)):
        print(f"INT4, grown token by token: {error:.2%}")
        assert less < error < 0.16


def test_a_page_that_grows_and_a_slot_that_moves_by_hand():
    # Scales that are powers of two; channels 0 and 2 share a byte, as do 1 and 3:
    #   channel 0   7 sets scale 1; 14 doubles it: 7 -> 3.5 -> 4 (even)
    #   channel 1   -7, then 3 inside the scale: nothing moves
    #   channel 2   0 leaves the scale at zero; -3.5 sets 1/2
    #   channel 3   14 sets scale 2; -14 leaves the scale alone
    k = np.array([[7, -7, 0, 14], [14, 3, -3.5, -14]], np.float32)[None, None]
    pages = room(1, 1, 4, entries=1, size=4, codec=INT4)
    for i in range(2):
        pages = put(pages, k[:, :, i : i + 1], -k[:, :, i : i + 1], first=i)
    page = int(pages.table[0, 0, 0, 0])
    assert pages.scales[page, 0].tolist() == [2, 1, 0.5, 2]
    assert nibbles(np.asarray(pages.k[page, :2])).tolist() == [[4, -7, 0, 7], [7, 3, -7, -7]]
    assert nibbles(np.asarray(pages.v[page, :2])).tolist() == [[-4, 7, 0, -7], [-7, -3, 7, 7]]
    pages = remove(pages, INT4, ALL, jnp.asarray([[0]]))
    assert nibbles(np.asarray(pages.k[page, 0])).tolist() == [7, 3, -7, -7]
    pos, keys, _ = contents(pages, 0, 0, INT4)
    assert pos.tolist() == [1]
    assert keys.tolist() == [[14, 3, -3.5, -14]]


@pytest.mark.slow
def test_codes_take_half_the_bytes_of_int8():
    def codes(spec: str) -> tuple[int, int]:
        """Allocated and live bytes of the pages, less those of positions, scales and page tables."""
        state = tiny.read(kvjax.policy(spec), [tiny.prompt(40)], 16, pages=48)[0]
        nbytes, pages = kvjax.nbytes(state), [room.pages for room in state.layers]
        slots, owned = 2 * 2 * (40 - 8), 2 * 2 * (40 - 8) // tiny.PAGE  # layers, heads, what the ring left
        rest = sum(x.nbytes for x in jax.tree.leaves([dataclasses.replace(p, k=None, v=None) for p in pages]))
        live = nbytes.live[..., 1].sum() - slots * 4 - owned * 2 * 8 * 4
        return int(nbytes.allocated[:, 1].sum()) - rest, int(live)

    assert codes("int8(8)") == (2 * 48 * tiny.PAGE * 2 * 8, 2 * 2 * 32 * 2 * 8)
    assert codes("int4(8)") == (2 * 48 * tiny.PAGE * 8, 2 * 2 * 32 * 8)


def test_a_byte_budget_buys_more_slots_in_fewer_bits():
    def slots(storage: str) -> int:
        policy = kvjax.policy(f"knorm + uniform('2560B') + {storage}")
        state, _ = kvjax.prefill(tiny.model(), policy, [tiny.prompt(70)], context=72, page=tiny.PAGE)
        return int(kvjax.metrics.live_slots(state)[0, 0, 0])

    # Two layers of two heads: 640 bytes per KV head; keys and values of 8 channels in 16 or in 8 bytes.
    assert (slots("int8(1)"), slots("int4(1)")) == (40, 70)


def test_an_odd_head_dim_is_refused_before_anything_is_computed():
    whole = tiny.model()
    odd = tiny.Tiny(decoder.Decoder(dataclasses.replace(whole.network.spec, head_dim=7)), whole.params)
    with pytest.raises(PolicyError, match=r"int4\(8\) stores two channels in a byte.*have 7.*Use int8"):
        kvjax.prefill(odd, kvjax.policy("int4(8)"), [tiny.prompt(20)], context=64)
    assert [Int4(8).width(80), kvjax.policy("int8").storage.width(7)] == [40, 7]


def test_the_recent_tokens_are_a_whole_number():
    for recent in (0, -1, 2.0):
        with pytest.raises(PolicyError, match="int4.*not a valid number of tokens"):
            Int4(recent=recent)


@pytest.mark.slow
def test_a_read_after_int4_is_near_the_exact_one():
    """The same prompt and tokens through exact pages and codes: logits differ, and by little."""
    tokens = np.asarray([tiny.prompt(6, 9)])
    logits = {}
    for spec in ("full", "int8(8)", "int4(8)"):
        policy = kvjax.policy(spec)
        state, _ = tiny.read(policy, [tiny.prompt(40)], 16, pages=48)
        logits[spec] = tiny.feed(policy, state, tokens)[1]
    gap = {spec: np.abs(x - logits["full"]).max() for spec, x in logits.items()}
    assert 0 < gap["int8(8)"] < 0.15
    assert gap["int8(8)"] < gap["int4(8)"] < 2.5
