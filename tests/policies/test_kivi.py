"""KIVI against NumPy, written from the paper (sections 3.2 and 3.3): codes, grids, growth, bytes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, append, contents, entry, remove, room

import kvjax
from kvjax.algebra import Policy, PolicyError
from kvjax.cache.pages import Pages
from kvjax.models import decoder
from kvjax.storage.kivi import Kivi

H, SIZE, T, GROUP = 16, 8, 16, 4
TWO, FOUR = Kivi(2, recent=1, group=GROUP), Kivi(4, recent=1, group=GROUP)
# One channel of keys stands out, as in the paper's figure 2.
DRAWN = np.random.default_rng(0).standard_normal((2, 1, 2, T, H)).astype(np.float32)
DRAWN[0, ..., 3] += 9


def put(pages: Pages, codec: Kivi, k: np.ndarray, v: np.ndarray, first: int = 0) -> Pages:
    return append(pages, codec, ALL, entry(k, v, first=first), jnp.zeros(k.shape[:3], jnp.int32))


def filled(codec: Kivi, at_a_time: int = T) -> Pages:
    pages = room(1, 2, H, entries=2, size=SIZE, codec=codec)
    for i in range(0, T, at_a_time):
        pages = put(pages, codec, *DRAWN[:, :, :, i : i + at_a_time], first=i)
    return pages


def down(x: np.ndarray) -> np.ndarray:
    """The largest float16 that is not above x."""
    near = x.astype(np.float16)
    return np.where(near.astype(np.float64) > x, np.nextafter(near, np.float16(-np.inf)), near)


def coded(x: np.ndarray, bits: int, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of groups along ``axis`` (Eq. 1): lowest value, step, rounded quotient; grids in float16."""
    low = down(x.min(axis=axis, keepdims=True).astype(np.float64)).astype(np.float64)
    step = -down(-(x.max(axis=axis, keepdims=True) - low) / (2**bits - 1)).astype(np.float64)
    return np.rint((x - low) / step), low, step


def right(x: np.ndarray, bits: int, which: int) -> np.ndarray:
    """What a read of [T, H] keys (0) or values (1) sees."""
    if which == 0:  # by channel, GROUP tokens
        codes, low, step = coded(x.reshape(-1, GROUP, H), bits, 1)
    else:  # by token, GROUP channels
        codes, low, step = coded(x.reshape(T, -1, GROUP), bits, 2)
    return (low + step * codes).reshape(T, H)


def unpacked(pool: np.ndarray, bits: int) -> np.ndarray:
    parts = [pool >> (bits * at) & (2**bits - 1) for at in range(8 // bits)]
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("codec", [TWO, FOUR], ids=repr)
def test_codes_at_once_are_numpys(codec):
    pages, bits = filled(codec), codec.bits
    assert pages.k.dtype == jnp.uint8
    assert pages.k.shape == pages.v.shape == (5, SIZE, H * bits // 8)
    for h in range(2):
        _, *stored = contents(pages, 0, h, codec)
        for which, actual in enumerate(stored):
            np.testing.assert_allclose(actual, right(DRAWN[which, 0, h], bits, which), atol=1e-5)
        page = int(pages.table[0, h, 0, 0])
        codes, low, step = coded(DRAWN[0, 0, h, :SIZE].reshape(2, GROUP, H), bits, 1)
        np.testing.assert_array_equal(unpacked(np.asarray(pages.k[page]), bits), codes.reshape(SIZE, H))
        np.testing.assert_array_equal(pages.scales.k[page, :, 0], low[:, 0])
        np.testing.assert_array_equal(pages.scales.k[page, :, 1], step[:, 0])


def test_keys_by_channel_lose_less_than_keys_by_token():
    """The paper's reason: a channel that stands out takes the others' codes, if a token shares a step."""
    x = DRAWN[0, 0, 0]
    by_channel, by_token = right(x, 2, 0), right(x, 2, 1)
    of_others = np.arange(GROUP) != 3  # of the group with the outlier
    errors = [np.abs(y - x)[:, :GROUP][:, of_others].mean() for y in (by_channel, by_token)]
    assert 3 * errors[0] < errors[1]


@pytest.mark.parametrize("codec", [TWO, FOUR], ids=repr)
@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_group_that_fills_bit_by_bit_holds_the_same_range(codec, at_a_time):
    """Without sight of what comes: ranges grow, codes are rounded again, at most half a step each time."""
    once, grown = filled(codec), filled(codec, at_a_time)
    for h in range(2):
        a, b = contents(once, 0, h, codec), contents(grown, 0, h, codec)
        np.testing.assert_array_equal(a[2], b[2])  # a value's grid is its own
        for at in range(2):
            x, y = (p.scales.k[int(p.table[0, h, 0, at])] for p in (once, grown))
            np.testing.assert_allclose(y[:, 0], x[:, 0], rtol=2e-3)
            np.testing.assert_allclose(y[:, 1], x[:, 1], rtol=2e-2)
        step = np.repeat(
            np.asarray(once.scales.k, np.float32)[np.asarray(once.table)[0, h, 0], :, 1], GROUP, 1
        )
        assert (np.abs(b[1] - DRAWN[0, 0, h]) <= 2 * step.reshape(T, H)).all()
    assert not np.array_equal(contents(once, 0, 0, codec)[1], contents(grown, 0, 0, codec)[1])


@pytest.mark.parametrize("at_once", [False, True], ids=["one", "several"])
def test_a_range_that_grows_codes_its_group_again_and_no_other(at_once):
    """By hand: a channel of 0 … 3 has step 1; a key of 6 makes it 2: 1 -> 0.5 -> 0 (even), 3 -> 1.5 -> 2."""
    k = np.repeat(np.array([0, 1, 3, 6], np.float32)[:, None], 4, axis=1)[None, None]
    codec, pages = Kivi(2, recent=1, group=4), room(1, 1, 4, entries=1, size=8, codec=TWO)
    pages = put(pages, codec, k[:, :, :3], k[:, :, :3])
    assert pages.scales.k[0, 0].tolist() == [[0] * 4, [1] * 4]
    assert unpacked(np.asarray(pages.k[0, :3]), 2)[:, 0].tolist() == [0, 1, 3]
    late = np.concatenate([k[:, :, 3:], k[:, :, :1]], axis=2) if at_once else k[:, :, 3:]
    pages = put(pages, codec, late, late, first=3)
    assert pages.scales.k[0, 0].tolist() == [[0] * 4, [2] * 4]
    assert contents(pages, 0, 0, codec)[1][:4, 0].tolist() == [0, 0, 4, 6]
    assert pages.scales.k[0, 1, 1, 0] == (jnp.finfo(jnp.float16).smallest_subnormal if at_once else 0)


def test_slots_come_and_go_within_a_few_steps():
    """Two KV heads of uneven length: evictions move tokens between groups, pages are taken again."""
    draw, codec = np.random.default_rng(3), FOUR
    pages, truth = room(1, 2, H, entries=3, size=SIZE, codec=codec), [{}, {}]
    for i in range(60):
        lengths = np.asarray(pages.length)[0, :, 0]
        if lengths.min() > 4 and draw.random() < 0.5 or lengths.max() == 3 * SIZE:
            victim = np.asarray([[draw.integers(n) if draw.random() < 0.7 else -1 for n in lengths]])
            for h in range(2):
                if victim[0, h] >= 0:
                    del truth[h][int(contents(pages, 0, h, codec)[0][victim[0, h]])]
            pages = remove(pages, codec, ALL, jnp.asarray(victim))
            continue
        x = draw.standard_normal((1, 2, 1, H)).astype(np.float32)
        pages = put(pages, codec, x, -x, first=i)
        for h in range(2):
            truth[h][i] = x[0, h, 0]
    assert len({len(t) for t in truth}) == 2
    for h in range(2):
        pos, k, v = contents(pages, 0, h, codec)
        assert sorted(pos.tolist()) == sorted(truth[h])
        exact = np.stack([truth[h][p] for p in pos.tolist()])
        assert np.abs(k - exact).max() < 1.2  # a step of a range of 5 is 0.33
        assert np.abs(v + exact).max() < 0.2


def test_a_group_of_equal_keys_is_exact_and_huge_ones_stay_finite():
    k = np.full((1, 2, GROUP, H), 2.5, np.float32)
    pages = put(room(1, 2, H, entries=1, size=SIZE, codec=TWO), TWO, k, np.zeros_like(k))
    np.testing.assert_allclose(contents(pages, 0, 0, TWO)[1], 2.5, atol=1e-6)
    np.testing.assert_allclose(contents(pages, 0, 0, TWO)[2], 0, atol=1e-6)
    pages = put(room(1, 2, H, entries=1, size=SIZE, codec=TWO), TWO, k * 1e6, -k * 1e6)
    assert np.isfinite(contents(pages, 0, 0, TWO)[1]).all()


def test_any_portions_of_a_text_give_the_same_codes():
    """The window shows a group's future: chunks of any size, and steps, leave the codes of a whole prompt."""
    policy, texts = Policy(storage=Kivi(2, recent=8, group=4)), [tiny.prompt(60, 1), tiny.prompt(43, 2)]
    held = []
    for chunk, prompt in ((60, 60), (7, 60), (16, 30)):  # the last goes on step by step
        state, _ = tiny.read(policy, [text[:prompt] for text in texts], chunk)
        if prompt < 60:
            more = np.asarray([(text[prompt:] + [0] * 60)[:30] for text in texts])
            state, _ = tiny.feed(policy, state, more[:, :13])
            state, _ = tiny.feed(policy, state, more[:, 13:], active=[True, False])
        pages = jax.device_get(state.layers[0].pages)  # later layers see codes or not, by the portions
        held.append((tiny.held(pages), pages.length))
    for other, length in held[1:]:
        np.testing.assert_array_equal(length, held[0][1])
        for stream, slots in held[0][0].items():
            assert slots.keys() == other[stream].keys()
            for pos, (k, v, _) in slots.items():
                np.testing.assert_allclose(other[stream][pos][0], k, atol=1e-4)
                np.testing.assert_allclose(other[stream][pos][1], v, atol=1e-4)


def test_a_byte_budget_counts_grids_too():
    assert Kivi(2).slot_bytes(64, jnp.dtype(jnp.bfloat16)) == 2 * 16 + 2 * 64 / 32 * 4 / 2 * 2
    assert Kivi(2, group=64).slot_bytes(64, jnp.dtype(jnp.bfloat16)) == 2 * 16 + 4 + 4


@pytest.mark.parametrize(
    ("spec", "most"), [("kivi(2)", 0.26), ("kivi(2, recent=32, group=64)", 0.20), ("kivi(4)", 0.40)]
)
def test_allocated_bytes_at_2048_tokens(spec, most):
    """Of ring, pages, grids, positions and tables; heads of 128 channels, as in the paper."""
    spec_ = dataclasses.replace(
        tiny.model().network.spec, num_layers=1, windows=(None,), head_dim=128, max_positions=4096
    )
    params = jax.tree.map(
        lambda shape: jnp.full(shape, 0.01, jnp.bfloat16),
        decoder.shapes(spec_),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    model = tiny.Tiny(decoder.Decoder(spec_), params)
    prompt = [at % 61 for at in range(2048)]
    state, _ = kvjax.prefill(model, kvjax.policy(spec), [prompt], context=2048)
    assert int(state.length[0]) == 2048
    allocated = kvjax.nbytes(state).allocated.sum()
    share = allocated / (2 * 2 * 128 * 2 * 2048)  # K and V, KV heads, channels, bytes
    print(f"{spec}: {share:.3f} of bfloat16")
    assert share <= most


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kivi(3)", "bits=3 is not a valid number of bits. Give 2 or 4"),
        ("kivi(2, recent=0)", "recent=0"),
        ("kivi(2, group=1)", "group=1 is not a valid number of tokens"),
        ("kivi(2, group=128)", "group=128 is not a valid number of tokens"),
    ],
)
def test_refusals(spec, words):
    with pytest.raises(PolicyError) as refused:
        kvjax.policy(spec)
    assert words in str(refused.value)


def test_heads_and_pages_that_do_not_fit_are_refused_before_anything_is_computed():
    whole = tiny.model()
    odd = tiny.Tiny(decoder.Decoder(dataclasses.replace(whole.network.spec, head_dim=6)), whole.params)
    with pytest.raises(PolicyError, match=r"stores 4 channels in a byte.*have 6 channels. Use int8"):
        kvjax.prefill(odd, kvjax.policy("kivi(2, group=4)"), [tiny.prompt(200)], context=256)
    with pytest.raises(PolicyError, match=r"group=32 does not divide pages of 8 slots"):
        kvjax.prefill(whole, kvjax.policy("kivi(2, recent=16)"), [tiny.prompt(20)], context=64, page=8)
