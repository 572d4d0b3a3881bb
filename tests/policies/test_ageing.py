"""GLOBAL in two precisions: random operations against sets in plain Python, reads against NumPy, bytes."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from policy_oracle import NATIVE, room

import kvjax
from kvjax import ageing, decode, layer
from kvjax.budgets.uniform import Uniform
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.policy import Eviction, Policy, PolicyError
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8
from kvjax.types import Heads

B, K, H, S, W, F, TARGET, SINKS, MANY = 3, 2, 4, 4, 3, 7, 12, 1, 5
seeds = st.integers(0, 2**32 - 1)
done: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True, repr=False)
class Worth(Eviction):
    """What a token is worth is given with it."""

    name = "worth"
    keeps = ("worth",)

    def score(self, params, slots):
        return slots.meta["worth"]


def policy(storage) -> Policy:
    return Policy(
        eviction=Worth(), budget=Uniform(TARGET, "every_step"), storage=storage, sinks=SINKS, recent=W
    )


def site(policy: Policy) -> layer.Site:
    return layer.Site(policy, {}, 0, 1, None, jnp.zeros(B, jnp.int32))


def empty(policy: Policy) -> LayerCache:
    exact, codes = policy.bounds(64, MANY)
    rooms = [
        room(B, K, H, entries=-(-most // S), size=S, codec=codec, meta=policy.keeps)
        for codec, most in ((NATIVE, exact), (policy.storage, codes))
    ]
    ring = rings.empty(B, K, W, H, jnp.dtype(jnp.float32), policy.keeps)
    return LayerCache(ring=ring, pages=None, summary=None).with_rooms(rooms)


@functools.partial(jax.jit, static_argnums=0)
def arrive(policy, cache, k, v, worth, length, count):
    """A step of one token or a chunk of several, without what is read."""
    pos = jnp.where(jnp.arange(k.shape[2]) < count[:, None], length[:, None] + jnp.arange(k.shape[2]), -1)
    new = Entry(k=k, v=v, pos=pos, admit=jnp.ones(k.shape[:3], bool), meta={"eviction.worth": worth})
    if k.shape[2] == 1:
        cache = layer.exchange(site(policy), cache, new, length, count)
    else:
        cache = layer.through_door(site(policy), cache, rings.leaving(cache.ring, new, length, count))
        cache = dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    cache = layer.evict(site(policy), cache, length + count, count > 0)
    return ageing.age(policy, cache, k.shape[2])


@functools.partial(jax.jit, static_argnums=0)
def pack(policy, cache, k, v, worth, bits, count):
    pos = jnp.where(jnp.arange(k.shape[2]) < count[:, None], jnp.arange(k.shape[2]), -1)
    new = Entry(k=k, v=v, pos=pos, admit=bits, meta={"eviction.worth": worth})
    return layer.pack(site(policy), cache, new, count)


@jax.jit
def clear(cache, gone):
    return cache.with_rooms([paging.clear(pages, gone) for pages in cache.rooms])


@jax.jit
def again(cache):
    """Into pools of other sizes and back, all pages renumbered."""
    return cache.with_rooms([pool.resize(pool.resize(p, p.count + 3), p.count) for p in cache.rooms])


class Machine(RuleBasedStateMachine):
    """Of every stream: the positions in the ring, in exact pages and in codes; of every row, its tokens."""

    storage = Int8(recent=F)
    slack = 4 / 127  # a few times half a step

    def __init__(self):
        super().__init__()
        self.policy = policy(self.storage)
        self.cache = empty(self.policy)
        self.start(range(B))

    def start(self, rows):
        if not hasattr(self, "k"):
            self.k, self.v = np.zeros((2, B, K, 0, H), np.float32)
            self.worth, self.length = np.zeros((B, K, 0), np.float32), np.zeros(B, np.int32)
            self.exact, self.codes = ({at: [] for at in np.ndindex(B, K)} for _ in range(2))
        for b, k in np.ndindex(B, K):
            if b in rows:
                self.exact[b, k], self.codes[b, k] = [], []
                self.length[b] = 0

    def draw(self, random, count):
        """Tokens at the next positions; what stood behind a row's end is forgotten."""
        t = int(count.max(initial=0))
        k, v = random.uniform(-1, 1, (2, B, K, t, H)).astype(np.float32)
        worth = random.random((B, K, t), np.float32)
        size = int((self.length + t).max())
        for name, new in (("k", k), ("v", v), ("worth", worth)):
            old = getattr(self, name)
            grown = np.zeros((B, K, max(size, old.shape[2]), *old.shape[3:]), np.float32)
            grown[:, :, : old.shape[2]] = old
            for b in range(B):
                grown[b, :, self.length[b] : self.length[b] + t] = new[b]
            setattr(self, name, grown)
        return k, v, worth

    def arrive(self, seed, t):
        random = np.random.default_rng(seed)
        count = random.integers(0, t + 1, B).astype(np.int32)
        count[random.integers(B)] = t
        tokens = self.draw(random, count)
        self.cache = arrive(self.policy, self.cache, *tokens, self.length.copy(), count)
        for b, h in np.ndindex(B, K):
            before, after = self.length[b], self.length[b] + count[b]
            exact, codes = self.exact[b, h], self.codes[b, h]
            exact += range(max(0, before - W), max(0, after - W))
            while count[b] and len(exact) + len(codes) + min(after, W) > TARGET:
                free = [p for p in (*exact, *codes) if p >= SINKS]
                victim = min(free, key=lambda p: self.worth[b, h, p])
                (exact if victim in exact else codes).remove(victim)
            while len(exact) > F - W:
                codes.append(exact.pop(0))
        self.length = self.length + count

    @rule(seed=seeds)
    def one(self, seed):
        self.arrive(seed, 1)
        self.check("one")

    @rule(seed=seeds)
    def one_again(self, seed):
        self.arrive(seed, 1)
        self.check("one")

    @rule(seed=seeds)
    def many(self, seed):
        self.arrive(seed, MANY)
        self.check("many")

    @rule(seed=seeds)
    def clear_rows(self, seed):
        gone = np.random.default_rng(seed).random(B) < 0.2
        self.cache = clear(self.cache, gone)
        self.start(np.flatnonzero(gone))
        self.check("clear")

    @rule()
    def resize(self):
        self.cache = again(self.cache)
        self.check("resize")

    @rule(seed=seeds)
    def prompt(self, seed):
        """All rows begin anew with a judged prompt of up to 20 tokens."""
        random, t = np.random.default_rng(seed), 20
        self.cache = clear(self.cache, np.ones(B, bool))
        self.start(range(B))
        count = random.integers(1, t + 1, B).astype(np.int32)
        count[random.integers(B)] = t
        tokens = self.draw(random, count)
        bits = (random.random((B, K, t)) < 0.4) | (np.arange(t) >= count[:, None, None] - W)  # as a verdict
        self.cache = pack(self.policy, self.cache, *tokens, bits, count)
        for b, h in np.ndindex(B, K):
            kept = [p for p in range(count[b] - W) if bits[b, h, p]]
            self.exact[b, h], self.codes[b, h] = kept[-(F - W) :], kept[: -(F - W)]
        self.length = count
        self.check("prompt")

    # --- the oracle's word

    def check(self, name):
        done[name] += 1
        for pages, mine, slack in zip(self.cache.rooms, (self.exact, self.codes), (0, self.slack)):
            tiny.owned_once(pages)
            found = tiny.held(pages)
            for at, slots in found.items():
                assert sorted(slots) == sorted(mine[at]), f"{name}: stream {at}"
                for pos, (k, v, meta) in slots.items():
                    np.testing.assert_allclose(k, self.k[*at, pos], atol=slack)
                    np.testing.assert_allclose(v, self.v[*at, pos], atol=slack)
                    assert meta == self.worth[*at, pos]
        done["aged"] += sum(map(len, self.codes.values()))


class Machine4(Machine):
    storage = Int4(recent=F)
    slack = 2 / 7


@pytest.mark.parametrize(("machine", "examples"), [(Machine, 24), (Machine4, 6)], ids=["int8", "int4"])
def test_random_tokens_are_where_the_oracle_says(machine, examples):
    done.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert min(done[name] for name in ("one", "many", "clear", "resize", "prompt")) > examples
    assert done["aged"] > 50 * examples
