"""10,000 random operations on the ring and the pages, against a plain Python oracle after every one.

The oracle knows no pages: it keeps a set of token numbers per list and one table of what each token
holds. Programs are compiled once per shape; hypothesis chooses the operations (derandomized). The quick
tests do two fifths of them.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvjax.algebra import Native, Selection, Storage
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.ring import Entry
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8

B, K, R, M, S, H, MANY = 3, 2, 2, 5, 4, 4, 6
SIZES = (40, 48)
seeds = st.integers(0, 2**32 - 1)
done: collections.Counter[str] = collections.Counter()


class Top(Selection):
    """A per-page value that is easy to recompute: the largest live key of each channel."""

    def summarise(self, k, live):
        return {"top": jnp.where(live[..., None], k, -9.0).max(axis=1)}


TOP = Top()


def empty(storage: Storage, count: int) -> Pages:
    return pool.empty(
        pages=count,
        size=S,
        rows=B,
        heads=K,
        lists=R,
        entries=M,
        **storage.layout(S, H, jnp.dtype(jnp.float32)),
        meta=("age",),
        summary={"top": (H,)},
    )


@functools.partial(jax.jit, static_argnums=0)
def append(storage, pages, k, v, pos, age, which):
    new = Entry(k=k, v=v, pos=pos, admit=which >= 0, meta={"age": age})
    return paging.append(pages, storage, TOP, new, which)


@functools.partial(jax.jit, static_argnums=0)
def remove(storage, pages, victim):
    return paging.remove(pages, storage, TOP, victim)


@functools.partial(jax.jit, static_argnums=0)
def retain(storage, pages, keep):
    return paging.retain(pages, storage, TOP, keep)


clear = jax.jit(paging.clear)
resize = jax.jit(pool.resize, static_argnums=1)
pick = jax.jit(pool.pick_rows, static_argnums=2)


class Tokens:
    """What every token ever made holds, by its number (used as its position)."""

    def __init__(self):
        self.k, self.v = np.zeros((0, K, H), np.float32), np.zeros((0, K, H), np.float32)
        self.age = np.zeros((0, K), np.float32)

    def make(self, random, count):
        """``count`` new tokens; their numbers."""
        self.k = np.concatenate([self.k, random.uniform(-1, 1, (count, K, H)).astype(np.float32)])
        self.v = np.concatenate([self.v, random.uniform(-1, 1, (count, K, H)).astype(np.float32)])
        self.age = np.concatenate([self.age, random.random((count, K), np.float32)])
        return np.arange(len(self.k) - count, len(self.k))

    def entry(self, numbers):
        """k, v, pos, age of tokens [B, T], heads major."""
        k, v = (np.moveaxis(x[numbers], 2, 1) for x in (self.k, self.v))
        return k, v, numbers.astype(np.int32), np.moveaxis(self.age[numbers], 2, 1)


class PagesMachine(RuleBasedStateMachine):
    """Streams of two lists; ``lists[b, k, r]`` is the set of token numbers a list holds."""

    storage: Storage = Native()
    slack = 0.0  # how far a stored value may be from the true one

    def __init__(self):
        super().__init__()
        self.count, self.tokens = SIZES[0], Tokens()
        self.pages = empty(self.storage, self.count)
        self.lists = {at: set() for at in np.ndindex(B, K, R)}
        self.seen = jax.device_get(self.pages)

    def needed(self):
        return sum(-(-len(x) // S) for x in self.lists.values())

    # --- operations

    def append(self, seed, t):
        random = np.random.default_rng(seed)
        numbers = self.tokens.make(random, B * t).reshape(B, t)
        which = random.integers(-1, R, (B, K, t)).astype(np.int32)
        for at in np.ndindex(B, K, t):
            if which[at] < 0:
                continue
            held = self.lists[(*at[:2], which[at])]
            held.add(int(numbers[at[0], at[2]]))
            if self.needed() > self.count or len(held) > M * S:
                held.remove(int(numbers[at[0], at[2]]))
                which[at] = -1
        before = self.seen
        self.check("append", append(self.storage, self.pages, *self.tokens.entry(numbers), which))
        if self.storage.scaled:  # scales of pages that were owned all the time only grow
            owned = before.refs > 0
            assert (self.seen.scales[owned] >= before.scales[owned]).all()

    @rule(seed=seeds)
    def append_one(self, seed):
        self.append(seed, 1)

    @rule(seed=seeds)
    def append_many(self, seed):
        self.append(seed, MANY)

    @rule(seed=seeds)
    def remove_some(self, seed):
        """A random live slot of each stream, or none."""
        random, victim = np.random.default_rng(seed), np.full((B, K), -1, np.int32)
        for b, k in np.ndindex(B, K):
            length = self.seen.length[b, k]
            live = [r * M * S + i for r in range(R) for i in range(length[r])]
            if live and random.random() < 0.85:
                victim[b, k] = line = int(random.choice(live))
                r, i = divmod(line, M * S)
                page = self.seen.table[b, k, r, i // S]
                self.lists[b, k, r].remove(int(self.seen.pos[page, i % S]))
        self.check("remove", remove(self.storage, self.pages, victim))

    @rule(seed=seeds)
    def retain_some(self, seed):
        """Any slots of each stream; what ``keep`` says of dead ones is noise."""
        random = np.random.default_rng(seed)
        keep = random.random((B, K, R * M * S)) < random.random((B, K, 1))
        for b, k, r in np.ndindex(B, K, R):
            at = np.arange(self.seen.length[b, k, r])
            pos = self.seen.pos[self.seen.table[b, k, r, at // S], at % S]
            self.lists[b, k, r] = set(pos[keep[b, k, r * M * S + at]].tolist())
        self.check("retain", retain(self.storage, self.pages, keep))

    @rule(seed=seeds)
    def clear_rows(self, seed):
        gone = np.random.default_rng(seed).random(B) < 0.3
        for at in self.lists:
            if gone[at[0]]:
                self.lists[at] = set()
        self.check("clear", clear(self.pages, gone))
        free = np.asarray(self.pages.free[: int(self.pages.n_free)])
        assert (np.diff(free) < 0).all()  # what is given out next is the lowest

    @rule()
    def resize_pool(self):
        other = SIZES[0] + SIZES[1] - self.count
        if self.needed() <= other:
            self.count = other
            self.check("resize", resize(self.pages, other))

    @rule(seed=seeds)
    def pick_rows(self, seed):
        """Any rows in any order, repeats included, as a fork makes them."""
        index = np.random.default_rng(seed).integers(0, B, B).astype(np.int32)
        lists = {at: set(self.lists[(int(index[at[0]]), *at[1:])]) for at in self.lists}
        if sum(-(-len(x) // S) for x in lists.values()) <= SIZES[0]:
            self.lists, self.count = lists, SIZES[0]
            self.check("pick", pick(self.pages, index, SIZES[0]))

    # --- the oracle's word

    def check(self, name, pages):
        done[name] += 1
        self.pages, p = pages, jax.device_get(pages)
        self.seen = p
        assert p.count == self.count
        assert not p.overflow
        self.check_ownership(p)
        at = np.arange(M * S)
        live = at < p.length[..., None]
        page = p.table[..., at // S]
        pos = p.pos[page, at % S]
        for stream, wanted in self.lists.items():
            positions = pos[stream][live[stream]].tolist()
            assert len(positions) == len(wanted)
            assert set(positions) == wanted
        head = np.broadcast_to(np.arange(K)[:, None, None], live.shape)[live]
        page, slot, number = page[live], np.broadcast_to(at % S, live.shape)[live], pos[live]
        k, v = self.stored(p)
        np.testing.assert_allclose(k[page, slot], self.tokens.k[number, head], atol=self.slack)
        np.testing.assert_allclose(v[page, slot], self.tokens.v[number, head], atol=self.slack)
        np.testing.assert_array_equal(p.meta["age"][page, slot], self.tokens.age[number, head])
        filled = np.zeros((p.count, S), bool)
        filled[page, slot] = True
        top = np.where(filled[..., None], k, -9.0).max(axis=1)
        np.testing.assert_allclose(p.summary["top"][p.refs > 0], top[p.refs > 0], atol=1e-6)

    def check_ownership(self, p):
        inside = np.arange(M) < -(-p.length // S)[..., None]
        assert (p.table[~inside] == -1).all()
        owned, free = p.table[inside], p.free[: int(p.n_free)]
        assert sorted([*owned.tolist(), *free.tolist()]) == list(range(p.count))
        assert (p.refs == np.bincount(owned, minlength=p.count)).all()
        assert p.refs.max(initial=0) <= 1

    def stored(self, p):
        return p.k, p.v


class Int8Machine(PagesMachine):
    """Codes: a value may have been rounded a few times as its page's scale grew, half a step each."""

    storage = Int8(recent=1)
    slack = 4 / 127

    def stored(self, p):
        return p.k * p.scales[:, None, 0], p.v * p.scales[:, None, 1]


class Int4Machine(PagesMachine):
    """The same in 4 bits, channels c and c + H / 2 in one byte."""

    storage = Int4(recent=1)
    slack = 2 / 7

    def stored(self, p):
        k, v = (np.concatenate([x & 15, x >> 4], -1).astype(np.float32) for x in (p.k, p.v))
        k, v = (np.where(x > 7, x - 16, x) for x in (k, v))
        return k * p.scales[:, None, 0], v * p.scales[:, None, 1]


# --- the ring ------------------------------------------------------------------------------------

W = 4
ring_put = jax.jit(rings.put)
ring_leaving = jax.jit(rings.leaving)
ring_rows = jax.jit(rings.rows)
ring_positions = jax.jit(rings.positions, static_argnums=1)


class RingMachine(RuleBasedStateMachine):
    """Rows of tokens; the ring holds the last W of each."""

    def __init__(self):
        super().__init__()
        self.ring = rings.empty(B, K, W, H, jnp.float32, ("age",))
        self.tokens = Tokens()
        self.rows = [[] for _ in range(B)]

    def put(self, seed, t):
        random = np.random.default_rng(seed)
        numbers = self.tokens.make(random, B * t).reshape(B, t)
        count = random.integers(0, t + 1, B).astype(np.int32)
        length = np.asarray([len(row) for row in self.rows], np.int32)
        k, v, _, age = self.tokens.entry(numbers)
        pos = np.where(np.arange(t) < count[:, None], length[:, None] + np.arange(t), -1).astype(np.int32)
        new = Entry(k=k, v=v, pos=pos, admit=age < 0.5, meta={"age": age})
        out, ring = jax.device_get(
            (ring_leaving(self.ring, new, length, count), ring_put(self.ring, new, length, count))
        )
        for b, row in enumerate(self.rows):
            row += numbers[b, : count[b]].tolist()
            gone = range(max(0, len(row) - W - count[b]), max(0, len(row) - W))
            assert sorted(out.pos[b][out.pos[b] >= 0].tolist()) == list(gone)
            self.equal(out, b, {c: row[p] for c, p in enumerate(out.pos[b].tolist()) if p >= 0})
        self.ring = ring
        self.check("put")

    def equal(self, held, b, tokens):
        """Do these slots of row b hold these tokens?"""
        slot, number = np.asarray([*tokens.keys()], int), np.asarray([*tokens.values()], int)
        for actual, true in ((held.k, self.tokens.k), (held.v, self.tokens.v)):
            np.testing.assert_array_equal(actual[b][:, slot], np.moveaxis(true[number], 0, 1))
        age = self.tokens.age[number].T
        np.testing.assert_array_equal(held.meta["age"][b][:, slot], age)
        np.testing.assert_array_equal(held.admit[b][:, slot], age < 0.5)

    def check(self, name):
        done[name] += 1
        length = np.asarray([len(row) for row in self.rows], np.int32)
        at = np.asarray(ring_positions(length, W))
        held = jax.device_get(self.ring)
        for b, row in enumerate(self.rows):
            newest = range(max(0, len(row) - W), len(row))
            assert sorted(at[b][at[b] >= 0].tolist()) == list(newest)
            self.equal(held, b, {j: row[p] for j, p in enumerate(at[b].tolist()) if p >= 0})

    @rule(seed=seeds)
    def put_one(self, seed):
        self.put(seed, 1)

    @rule(seed=seeds)
    def put_many(self, seed):
        self.put(seed, MANY)

    @rule(seed=seeds)
    def pick(self, seed):
        index = np.random.default_rng(seed).integers(0, B, B)
        self.ring = ring_rows(self.ring, index)
        self.rows = [list(self.rows[i]) for i in index]
        self.check("rows")


OPERATIONS = {PagesMachine: 4500, Int8Machine: 3000, Int4Machine: 500, RingMachine: 2000}


@pytest.mark.parametrize("share", [0.4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", OPERATIONS, ids=lambda m: m.__name__)
def test_random_operations_agree_with_the_oracle(machine, share):
    steps, count = 50, int(share * OPERATIONS[machine])
    before = done.total()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count * 9 // (8 * steps) + 4,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert done.total() - before >= count
    if machine is not RingMachine:
        assert (
            min(done[name] for name in ("append", "remove", "retain", "clear", "resize", "pick"))
            > 100 * share
        )


def test_a_full_pool_or_list_says_so():
    """The flag that guards reservations: too few pages, or a list that is full; never silent."""
    storage, tokens = Native(), Tokens()
    numbers = tokens.make(np.random.default_rng(0), B * MANY).reshape(B, MANY)
    which = np.zeros((B, K, MANY), np.int32)
    small = resize(empty(storage, SIZES[0]), 8)  # 6 tokens in each of 6 streams need 12 pages of 4
    assert bool(append(storage, small, *tokens.entry(numbers), which).overflow)
    fits = resize(empty(storage, SIZES[0]), 12)
    assert not bool(append(storage, fits, *tokens.entry(numbers), which).overflow)
    pages = empty(storage, SIZES[1])
    for _ in range(M * S // MANY):
        pages = append(storage, pages, *tokens.entry(numbers), which)
    assert not bool(pages.overflow)
    assert bool(append(storage, pages, *tokens.entry(numbers), which).overflow)


def test_a_pool_of_another_size_has_its_pages_list_by_list():
    """Tokens that come in turns leave the lists' pages in turns; a prompt leaves each list's in a row."""
    storage, tokens = Native(), Tokens()
    which, pages = np.zeros((B, K, MANY), np.int32), empty(storage, SIZES[1])
    for _ in range(3):
        numbers = tokens.make(np.random.default_rng(0), B * MANY).reshape(B, MANY)
        pages = append(storage, pages, *tokens.entry(numbers), which)
    tables = (np.asarray(x.table) for x in (pages, resize(pages, SIZES[1] + 3)))
    before, moved = (table[table >= 0] for table in tables)
    assert (np.diff(before) != 1).any()
    np.testing.assert_array_equal(moved, np.arange(len(before)))
