"""A token at the window exit takes the slot of the one that it evicts, as if it had been stored first."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_oracle import room

from kvjax import layer
from kvjax.algebra import Every, Policy
from kvjax.budgets.confidence import Confidence
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer import _evict
from kvjax.policies.knorm import KNorm
from kvjax.policies.wg_kv import WriteGate
from kvjax.storage.int8 import Int8

B, K, H, S, W, STEPS = 3, 2, 4, 4, 3, 40
TOTAL = jnp.zeros(B, jnp.int32)
UNIFORM = Policy(eviction=KNorm(), budget=Uniform(12, "every_step"), sinks=2, recent=W)
SURE = dataclasses.replace(UNIFORM, budget=Confidence(tight=7, loose=13, threshold=0.2))
OFTEN = dataclasses.replace(UNIFORM, budget=Uniform(12, Every(2)))
CODES = dataclasses.replace(UNIFORM, storage=Int8(recent=W))
GATED = dataclasses.replace(UNIFORM, admission=WriteGate(0.5, window=W))
"""Some enter and some do not; admission bits are given with the tokens here."""


def empty(policy: Policy) -> LayerCache:
    ring = rings.empty(B, K, W, H, jnp.dtype(jnp.float32), policy.keeps)
    pages = room(B, K, H, entries=5, size=S, codec=policy.storage, meta=policy.keeps)
    return LayerCache(ring=ring, pages=pages, summary=None)


@functools.partial(jax.jit, static_argnames=("policy", "taking"))
def steps(policy: Policy, drawn, active, sure, taking: bool) -> tuple[LayerCache, jax.Array]:
    """All steps, and what evict found too much at each: the slots that nobody took."""

    def one(carry, x):
        cache, length = carry
        (k, v, norm, admit), count, c = x
        site = layer.LayerInfo(policy, {}, 0, 1, None, TOTAL, c)
        pos = jnp.where(count > 0, length, -1)[:, None]
        new = Entry(k=k, v=v, pos=pos, admit=admit, meta={"eviction.norm": norm})
        if taking:
            cache = layer.admit_or_replace(site, cache, new, length, count)
        else:
            cache = layer.admit(site, cache, rings.leaving(cache.ring, new, length, count))
            cache = dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
        held = cache.pages.length.sum(axis=-1)
        acts = _evict.due(policy, length + count, count)
        cache = layer.evict(site, cache, length + count, acts)
        return (cache, length + count), held - cache.pages.length.sum(axis=-1)

    return jax.lax.scan(one, (empty(policy), TOTAL), (drawn, active, sure))


def run_steps(policy: Policy, taking: bool, seed: int = 0):
    draw = np.random.default_rng(seed)
    shape = (STEPS, B, K, 1)
    norms = np.round(draw.random(shape) * 4).astype(np.float32)  # many ties
    admit = draw.random(shape) < (0.6 if policy is GATED else 2)
    kv = draw.standard_normal((2, *shape, H)).astype(np.float32)
    active = (draw.random((STEPS, B)) < 0.9).astype(np.int32)
    sure = draw.random((STEPS, B)).astype(np.float32)
    (cache, _), dropped = steps(policy, (*kv, norms, admit), active, sure, taking)
    return cache, np.asarray(dropped)


@pytest.mark.parametrize(
    "policy", [UNIFORM, SURE, OFTEN, CODES, GATED], ids=["uniform", "sure", "often", "codes", "gated"]
)
def test_it_is_as_if_it_had_entered_first(policy):
    (taken, dropped), (entered, all_dropped) = (run_steps(policy, taking) for taking in (True, False))
    tiny.owned_once(taken.pages)
    fast, slow = tiny.held(taken.pages), tiny.held(entered.pages)
    for b, h in np.ndindex(B, K):
        assert fast[b, h].keys() == slow[b, h].keys()
        for pos, (k, v, meta) in slow[b, h].items():
            np.testing.assert_allclose(fast[b, h][pos][0], k, atol=0.1 if policy is CODES else 0)
            np.testing.assert_allclose(fast[b, h][pos][1], v, atol=0.1 if policy is CODES else 0)
            np.testing.assert_array_equal(fast[b, h][pos][2], meta)
    np.testing.assert_array_equal(taken.pages.length, entered.pages.length)
    assert int(taken.pages.n_free) == int(entered.pages.n_free)
    assert not bool(taken.pages.overflow)
    if policy is OFTEN:  # two go at a time
        np.testing.assert_array_equal(dropped, all_dropped)
    else:
        assert all_dropped.sum() > 2 * dropped.sum(), "slots were taken, so fewer are left to drop"


def test_nobody_takes_a_slot_where_lists_are_two_or_pages_age():
    cache = empty(UNIFORM)
    out = Entry(
        k=jnp.zeros((B, K, 1, H)), v=jnp.zeros((B, K, 1, H)), pos=jnp.zeros((B, 1), jnp.int32),
        admit=jnp.ones((B, K, 1), bool), meta={"eviction.norm": jnp.zeros((B, K, 1))},
    )  # fmt: skip
    site = layer.LayerInfo(UNIFORM, {}, 0, 1, None, TOTAL)
    list_id = jnp.zeros((B, K, 1), jnp.int32)
    ask = functools.partial(_evict.slot_to_replace, site, leaving=out, list_id=list_id)
    one = jnp.ones(B, jnp.int32)
    assert ask(cache, length=one, count=one) is not None
    aged = cache.with_pools([cache.pages, room(B, K, H, entries=5, size=S, codec=Int8(recent=W))])
    assert ask(aged, length=one, count=one) is None
    pages = cache.pages
    split = dataclasses.replace(
        pages, table=jnp.repeat(pages.table, 2, axis=2), length=jnp.repeat(pages.length, 2, axis=2)
    )
    assert ask(cache.with_pools([split]), length=one, count=one) is None
