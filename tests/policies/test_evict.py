"""Eviction against plain Python: one victim or many at once are those of "the lowest goes", repeated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import ALL, NATIVE, append, entry, room

from kvjax import layer
from kvjax.algebra import Policy
from kvjax.budgets.uniform import Uniform
from kvjax.cache import pages as paging
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies.knorm import KNorm
from kvjax.storage.int8 import Int8

HEADS, SINKS, ROWS = 2, 2, 3
random = np.random.default_rng(11)


def lowest_goes(score: dict[int, float], target: int) -> set[int]:
    """Position -> score, until few enough are left; of equals the highest position goes."""
    left = dict(score)
    while len(left) > target and any(pos >= SINKS for pos in left):
        del left[min((x, -pos) for pos, x in left.items() if pos >= SINKS)[1] * -1]
    return set(left)


@pytest.mark.parametrize("storage", [NATIVE, Int8(recent=1)], ids=repr)
@pytest.mark.parametrize("most", [0, 1, 2, 17], ids=lambda n: f"{n} victims")
def test_the_lowest_go_at_once(storage, most):
    """Rows are over their target by different numbers, one row by none, one does not take part."""
    tokens, target = 24, 24 - most + 1  # the ring's one token counts
    policy = Policy(eviction=KNorm(), budget=Uniform(target, "every_step"), sinks=SINKS, storage=storage)
    ring = rings.empty(ROWS, HEADS, 1, 3, jnp.dtype(jnp.float32), policy.keeps)
    pages = room(ROWS, HEADS, 3, entries=4, size=8, codec=storage, meta=policy.keeps)
    keys = random.standard_normal((ROWS, HEADS, tokens, 3))
    norms = np.round(random.random((ROWS, HEADS, tokens)) * 6)  # many ties
    which = np.zeros((ROWS, HEADS, tokens), np.int32)
    which[0, 1, 20:] = -1  # a shorter list beside a long one
    which[2] = -1
    which[2, :, :3] = 0
    pages = append(pages, storage, ALL, entry(keys, meta={"eviction.norm": norms}), jnp.asarray(which))
    cache = LayerCache(ring=ring, pages=pages, summary=None)
    total = jnp.full(ROWS, tokens + 1)

    @jax.jit
    def run(cache, crossed):
        return layer.evict(layer.LayerInfo(policy, {}, 0, 1, None, total), cache, total, crossed)

    after = run(cache, jnp.asarray([True, False, True])).pages
    tiny.owned_once(after)
    held, before = tiny.held(after), tiny.held(pages)
    for b, h in np.ndindex(ROWS, HEADS):
        score = {pos: -norms[b, h, pos] for pos in before[b, h]}
        right = lowest_goes(score, target - 1) if b != 1 else set(before[b, h])
        assert set(held[b, h]) == right
        for pos, (k, _, meta) in held[b, h].items():
            np.testing.assert_allclose(k, keys[b, h, pos], atol=0.05 if storage.scaled else 0)
            assert meta[0] == norms[b, h, pos]
    assert most == 0 or held[0, 0].keys() != before[0, 0].keys(), "nobody went"


def test_a_kv_head_of_protected_tokens_loses_none():
    policy = Policy(eviction=KNorm(), budget=Uniform(9, "every_step"), sinks=8)
    pages = room(1, HEADS, 3, entries=2, size=8, meta=policy.keeps)
    new = entry(random.standard_normal((1, HEADS, 8, 3)), meta={"eviction.norm": np.ones((1, HEADS, 8))})
    pages = append(pages, NATIVE, ALL, new, jnp.zeros((1, HEADS, 8), jnp.int32))
    site = layer.LayerInfo(policy, {}, 0, 1, None, jnp.asarray([8]))
    for over in (1, 5):
        victims = layer.victims(
            *layer.ranked(site, paging.slots(pages), site.total), jnp.full((1, HEADS), over)
        )
        assert not np.asarray(victims).any()
    ring = rings.empty(1, HEADS, 4, 3, jnp.dtype(jnp.float32), policy.keeps)
    cache = LayerCache(ring=ring, pages=pages, summary=None)
    after = layer.evict(site, cache, jnp.asarray([12]), jnp.asarray([True]))
    assert np.asarray(after.pages.length).tolist() == [[[8], [8]]]
