"""K-norm against NumPy: small norms stay, ties keep the lowest position, padding never counts."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, NATIVE, append, best, contents, entry, judge, kept, observe, positions, room

import kvjax
from kvjax import decode, layer
from kvjax.algebra import Policy
from kvjax.budgets.uniform import Uniform
from kvjax.cache import pages as paging
from kvjax.policies.knorm import KNorm

LENGTHS, T, HEADS, DIM = (20, 13, 5), 20, 2, 6
KEYS = np.random.default_rng(0).standard_normal((3, HEADS, T, DIM))
# Padding holds the smallest keys of all: whoever looks at it keeps it.
KEYS[positions(LENGTHS, T)[:, None, :].repeat(HEADS, 1) < 0] = 0
NORMS = np.sqrt((KEYS**2).sum(-1))


def test_score_orders_keys_by_falling_norm():
    score = np.asarray(KNorm().score_prompt(None, observe(LENGTHS, T, k=KEYS)))
    np.testing.assert_allclose(score, -NORMS, rtol=1e-6)
    assert score[0, 0].argsort().tolist() == (-NORMS[0, 0]).argsort().tolist()


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 0), (0, 3), (2, 3), (4, 5)])
def test_kept_set_is_the_top_of_the_scores_protected_first(sinks, recent):
    policy = Policy(eviction=KNorm(), budget=Uniform(9), sinks=sinks, recent=recent)
    bits = judge(policy, observe(LENGTHS, T, k=KEYS))
    real = positions(LENGTHS, T)[:, None, :, None] >= 0
    np.testing.assert_array_equal(bits, judge(policy, observe(LENGTHS, T, k=np.where(real, KEYS, np.nan))))
    for b, length in enumerate(LENGTHS):
        for h in range(HEADS):
            right = best(-NORMS[b, h], length, 9, sinks=sinks, newest=recent)
            assert kept(bits[b, h]) == right
            assert len(right) == min(9, length)


def test_a_share_smaller_than_what_is_protected_keeps_the_protected_alone():
    policy = Policy(eviction=KNorm(), budget=Uniform(0.1), sinks=3, recent=4)
    bits = judge(policy, observe(LENGTHS, T, k=KEYS))
    for b, length in enumerate(LENGTHS):
        for h in range(HEADS):
            assert kept(bits[b, h]) == [p for p in range(length) if p < 3 or p >= length - 4]


def test_norms_are_float32_where_keys_are_not():
    # Their norms, sqrt(10001) and 100, are one number in bfloat16.
    keys = jnp.asarray([[[[100.0, 1.0], [100.0, 0.0]]]], jnp.bfloat16)
    seen = dataclasses.replace(observe((2,), 2), values={"k": keys})
    score = np.asarray(KNorm().score_prompt(None, seen))[0, 0]
    np.testing.assert_allclose(score, -np.sqrt([10001, 10000]), rtol=1e-6)
    assert score[0] < score[1]


def test_a_share_that_rounds_to_nothing_leaves_a_row_its_new_tokens():
    # 5 % of 4 tokens is none: from the first step on the row sees what was generated, and nothing else.
    policy, text = Policy(eviction=KNorm(), budget=Uniform(0.05)), tiny.prompt(4 + 6, 3)
    state, first = kvjax.prefill(tiny.model(), policy, [text[:4]], context=tiny.CONTEXT, page=tiny.PAGE)
    state, rest = tiny.feed(policy, decode.reserve(policy, state, 6, 1), np.asarray([text[4:]]))

    def see(layer: int, head: int) -> np.ndarray:
        at = np.arange(len(text))
        return tiny.causal(len(text)) & ((at[:, None] < 4) | (at >= 4))

    logits = np.concatenate([first, rest[0]])
    np.testing.assert_allclose(logits, tiny.oracle(text, see)[3:], atol=2e-4)
    for pages in (cache.pages for cache in state.layers):
        assert [sorted(slots) for slots in tiny.held(pages).values()] == [list(range(4, 9))] * HEADS


def test_equal_norms_keep_the_lowest_positions():
    # 3-4-0, 0-5-0 and 4-0-3 have norm 5 to the last bit.
    turns = np.array([[3.0, 4, 0], [0, 5, 0], [4, 0, 3], [0, -5, 0]])
    keys = np.stack([turns[np.arange(12) % 4], turns[np.arange(12)[::-1] % 4]])[None]
    keys[0, :, 8] = 1
    bits = judge(Policy(eviction=KNorm(), budget=Uniform(5)), observe((12,), 12, k=keys))
    assert [kept(x) for x in bits[0]] == [[0, 1, 2, 3, 8]] * 2


def test_rejected_tokens_never_stay():
    admit = np.random.default_rng(1).random((3, HEADS, T)) < 0.4
    policy = Policy(eviction=KNorm(), budget=Uniform(6))
    bits = judge(policy, observe(LENGTHS, T, k=KEYS), admit)
    for b, length in enumerate(LENGTHS):
        for h in range(HEADS):
            score = np.where(admit[b, h], -NORMS[b, h], -np.inf)
            assert kept(bits[b, h]) == [p for p in best(score, length, 6) if admit[b, h, p]]


def test_while_decoding_the_largest_unprotected_norm_goes_the_newest_of_equals():
    keys = np.round(np.random.default_rng(2).random((2, HEADS, 11, 1)) * 3) * 2  # many ties
    new = entry(keys, meta={"eviction.norm": np.abs(keys[..., 0])})
    policy = Policy(eviction=KNorm(), budget=Uniform(8, "every_step"), sinks=3)
    pages = room(2, HEADS, 1, entries=2, meta=("eviction.norm",))
    pages = append(pages, NATIVE, ALL, new, jnp.zeros((2, HEADS, 11), jnp.int32))
    site = layer.LayerInfo(policy, {}, 0, 1, None, jnp.asarray([11, 11]))
    victims = layer.victims(
        *layer.ranked(site, paging.slots(pages), site.total), jnp.ones((2, HEADS), jnp.int32)
    )
    assert (victims.sum(axis=-1) == 1).all()
    victim = np.asarray(victims).argmax(axis=-1)
    for b in range(2):
        for h in range(HEADS):
            pos, k, _ = contents(pages, b, h)
            norm = np.abs(k[:, 0])
            right = max((norm[i], pos[i], i) for i in range(11) if pos[i] >= 3)[2]
            assert victim[b, h] == right
