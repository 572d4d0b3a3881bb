"""Rows that come and go, against an oracle that knows no pages: no row ever reads another's slots.

The oracle is a table of what each token holds and, for each row, the tokens of every KV head's lists. After
each operation every live slot of every row is compared, and every page is owned once or free.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.algebra import Native, Selection, Storage
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import rows as rowing
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.storage.int8 import Int8

B, K, R, M, S, H, W = 4, 2, 2, 4, 4, 4, 3
SIZES, SOURCES = (36, 44), (6, 16)


class Top(Selection):
    """A per-page value that is easy to recompute."""

    def summarise(self, k, live):
        return {"top": jnp.where(live[..., None], k, -9.0).max(axis=1)}


TOP = Top()


def empty(storage: Storage, rows: int, count: int, entries: int = M) -> LayerCache:
    pages = pool.empty(
        pages=count,
        size=S,
        rows=rows,
        heads=K,
        lists=R,
        entries=entries,
        **storage.layout(S, H, jnp.dtype(jnp.float32)),
        meta=("age",),
        summary={"top": (H,)},
    )
    ring = rings.empty(rows, K, W, H, jnp.float32, ("age",))
    return LayerCache(ring=ring, pages=pages, summary={"sum": jnp.zeros((rows, K, H))})


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def append(storage, cache, k, v, pos, age, which):
    new = Entry(k=k, v=v, pos=pos, admit=which >= 0, meta={"age": age})
    return dataclasses.replace(cache, pages=paging.append(cache.pages, storage, TOP, new, which))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def remove(storage, cache, victim):
    return dataclasses.replace(cache, pages=paging.remove(cache.pages, storage, TOP, victim))


@jax.jit
def put(cache, k, v, age, row):
    """Marks a row's ring and summary as its own."""
    ring = dataclasses.replace(
        cache.ring,
        k=cache.ring.k.at[row].set(k),
        v=cache.ring.v.at[row].set(v),
        meta={"age": cache.ring.meta["age"].at[row].set(age)},
    )
    return dataclasses.replace(cache, ring=ring, summary={"sum": cache.summary["sum"].at[row].set(k[:, 0])})


insert = jax.jit(rowing.insert, donate_argnums=0)
release = jax.jit(rowing.release, donate_argnums=0)
cut = jax.jit(rowing.cut, static_argnums=2)
resize = jax.jit(pool.resize, static_argnums=1)


class History:
    """A running batch of four rows and what the oracle knows of it."""

    lends = False

    def __init__(self, storage: Storage, seed: int) -> None:
        self.storage, self.random = storage, np.random.default_rng(seed)
        self.count = SIZES[0]
        self.cache = empty(storage, B, self.count)
        self.lists: dict[int, dict[tuple[int, int], set[int]]] = {}
        self.rings: dict[int, np.ndarray] = {}
        self.k, self.v = np.zeros((0, K, H), np.float32), np.zeros((0, K, H), np.float32)
        self.age = np.zeros((0, K), np.float32)
        self.done: collections.Counter[str] = collections.Counter()
        self.slack = 5 / 127 if storage.scaled else 0.0

    def tokens(self, many: int) -> np.ndarray:
        draw = self.random
        self.k = np.concatenate([self.k, draw.uniform(-1, 1, (many, K, H)).astype(np.float32)])
        self.v = np.concatenate([self.v, draw.uniform(-1, 1, (many, K, H)).astype(np.float32)])
        self.age = np.concatenate([self.age, draw.random((many, K), np.float32)])
        return np.arange(len(self.k) - many, len(self.k))

    def entry(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        k, v, age = (np.moveaxis(x[numbers], 2, 1) for x in (self.k, self.v, self.age))
        return k, v, numbers.astype(np.int32), age

    def pages(self) -> int:
        return sum(-(-len(x) // S) for lists in self.lists.values() for x in lists.values())

    # --- operations

    def come(self) -> None:
        """A row that was read alone enters the batch; its pool is small or large, its lists short or long."""
        free = [row for row in range(B) if row not in self.lists]
        if not free:
            return
        row = int(self.random.choice(free))
        count = int(self.random.choice(SOURCES))
        source, lists = empty(self.storage, 1, count, M if count == SOURCES[0] else M + 1), {}
        for _ in range(int(self.random.integers(0, 4))):
            numbers = self.tokens(6)
            which = self.random.integers(-1, R, (1, K, 6)).astype(np.int32)
            for head, at in np.ndindex(K, 6):
                if which[0, head, at] >= 0:
                    lists.setdefault((head, int(which[0, head, at])), set()).add(int(numbers[at]))
            source = append(self.storage, source, *self.entry(numbers[None]), which)
        if (
            sum(-(-len(x) // S) for x in lists.values()) > count
            or max(map(len, lists.values()), default=0) > M * S
        ):
            return
        if self.pages() + sum(-(-len(x) // S) for x in lists.values()) > self.count:
            return
        self.rings[row] = own = self.tokens(W)
        k, v, _, age = self.entry(own[None])
        source = put(source, k[0], v[0], age[0], 0)
        self.cache = insert(self.cache, source, np.int32(row))
        self.lists[row] = {at: lists.get(at, set()) for at in np.ndindex(K, R)}
        self.check("insert")

    def go(self) -> None:
        """Some rows leave at once."""
        gone = self.random.random(B) < 0.4
        before = int(self.cache.pages.n_free)
        freed = self.freed(gone)
        self.cache = release(self.cache, gone)
        assert int(self.cache.pages.n_free) == before + freed
        self.lists = {row: lists for row, lists in self.lists.items() if not gone[row]}
        self.rings = {row: own for row, own in self.rings.items() if not gone[row]}
        self.check("release")

    def freed(self, gone: np.ndarray) -> int:
        """Pages that nobody owns once these rows are gone."""
        return sum(-(-len(x) // S) for row in self.lists if gone[row] for x in self.lists[row].values())

    def write(self) -> None:
        """A token for some of the rows that are there."""
        numbers, which = self.tokens(B), np.full((B, K, 1), -1, np.int32)
        for row, lists in self.lists.items():
            for head in range(K):
                kind = int(self.random.integers(-1, R))
                if kind < 0 or len(lists[head, kind]) >= M * S:
                    continue
                lists[head, kind].add(int(numbers[row]))
                if self.pages() > self.count:
                    lists[head, kind].remove(int(numbers[row]))
                else:
                    which[row, head, 0] = kind
        self.cache = append(self.storage, self.cache, *self.entry(numbers[:, None]), which)
        self.check("write")

    def evict(self) -> None:
        """A slot of some KV heads."""
        p, victim = jax.device_get(self.cache.pages), np.full((B, K), -1, np.int32)
        for row, lists in self.lists.items():
            for head in range(K):
                live = [r * M * S + i for r in range(R) for i in range(p.length[row, head, r])]
                if live and self.random.random() < 0.8:
                    victim[row, head] = line = int(self.random.choice(live))
                    r, i = divmod(line, M * S)
                    lists[head, r].remove(int(p.pos[p.table[row, head, r, i // S], i % S]))
        self.cache = remove(self.storage, self.cache, victim)
        self.check("evict")

    def copy_out(self) -> None:
        """A row as a state of its own."""
        if self.lists:
            row = int(self.random.choice(list(self.lists)))
            alone = jax.device_get(cut(self.cache, np.int32(row), (16,)))
            self.compare(alone, {0: self.lists[row]}, {0: self.rings[row]})
            self.check("cut")

    def regrow(self) -> None:
        """The pool takes its other size."""
        other = sum(SIZES) - self.count
        if self.pages() <= other:
            self.count = other
            self.cache = dataclasses.replace(self.cache, pages=resize(self.cache.pages, other))
            self.check("resize")

    # --- the oracle's word

    def check(self, name: str) -> None:
        self.done[name] += 1
        self.compare(jax.device_get(self.cache), self.lists, self.rings)

    def compare(self, cache: LayerCache, lists: dict, own: dict) -> None:
        p = cache.pages
        inside = np.arange(p.table.shape[-1]) < (-(-p.length // S))[..., None]
        owned, free = p.table[inside], p.free[: int(p.n_free)]
        owners = collections.Counter(owned.tolist())
        assert sorted([*owners, *free.tolist()]) == list(range(p.count)), "a page leaked"
        assert self.lends or not owners or max(owners.values()) == 1
        assert (p.refs == np.bincount(owned, minlength=p.count)).all()
        assert (p.table[~inside] == -1).all()
        assert not p.overflow
        k, v = p.k, p.v
        if p.scales is not None:
            k, v = k * p.scales[:, None, 0], v * p.scales[:, None, 1]
        for row in range(len(p.length)):
            assert row in lists or not p.length[row].any(), "a free row owns slots"
        for row, of_row in lists.items():
            for (head, r), numbers in of_row.items():
                at = np.arange(p.length[row, head, r])
                page, slot = p.table[row, head, r, at // S], at % S
                positions = p.pos[page, slot]
                assert sorted(positions.tolist()) == sorted(numbers)
                np.testing.assert_allclose(k[page, slot], self.k[positions, head], atol=self.slack)
                np.testing.assert_allclose(v[page, slot], self.v[positions, head], atol=self.slack)
                np.testing.assert_array_equal(p.meta["age"][page, slot], self.age[positions, head])
        for row, numbers in own.items():
            np.testing.assert_array_equal(cache.ring.k[row], np.moveaxis(self.k[numbers], 0, 1))
            np.testing.assert_array_equal(cache.ring.meta["age"][row], self.age[numbers].T)
            np.testing.assert_array_equal(cache.summary["sum"][row], self.k[numbers[0]])

    def run(self, operations: int) -> None:
        verbs = (
            self.come,
            self.come,
            self.go,
            self.write,
            self.write,
            self.evict,
            self.copy_out,
            self.regrow,
        )
        while self.done.total() < operations:
            verbs[self.random.integers(len(verbs))]()


class Lending(History):
    """Rows that begin with the same state share its full pages; no slot is freed while a row is there."""

    lends = True

    def __init__(self, storage: Storage, seed: int) -> None:
        super().__init__(storage, seed)
        self.beginnings: list[tuple[LayerCache, dict, np.ndarray]] = []
        self.of: dict[int, list[np.ndarray]] = {}
        self.twice = self.lent = self.shared = 0

    def pages(self) -> int:
        return super().pages() - self.twice

    def freed(self, gone: np.ndarray) -> int:
        p = jax.device_get(self.cache.pages)
        owners = collections.defaultdict(set)
        for row, *_, page in zip(*np.nonzero(p.table >= 0), p.table[p.table >= 0]):
            owners[page].add(row)
        return sum(all(gone[row] for row in rows) for rows in owners.values())

    def check(self, name: str) -> None:
        super().check(name)
        refs = np.asarray(self.cache.pages.refs)
        self.twice = int(np.maximum(refs - 1, 0).sum())
        self.shared += bool(self.twice)

    def read(self, source: LayerCache, lists: dict) -> tuple[LayerCache, dict]:
        """Six tokens more."""
        numbers, lists = self.tokens(6), {at: set(x) for at, x in lists.items()}
        which = self.random.integers(-1, R, (1, K, 6)).astype(np.int32)
        for head, at in np.ndindex(K, 6):
            if which[0, head, at] >= 0:
                lists[head, int(which[0, head, at])].add(int(numbers[at]))
        copy = jax.tree.map(jnp.copy, source)
        return append(self.storage, copy, *self.entry(numbers[None]), which), lists

    def come(self) -> None:
        free = [row for row in range(B) if row not in self.lists]
        if not free:
            return
        row, begins = int(self.random.choice(free)), []
        source, lists = empty(self.storage, 1, 16), {at: set() for at in np.ndindex(K, R)}
        if self.beginnings and self.random.random() < 0.8:
            source, lists, full = self.beginnings[self.random.integers(len(self.beginnings))]
            begins.append(full)
        for _ in range(int(self.random.integers(0, 3))):
            source, lists = self.read(source, lists)
        if max(map(len, lists.values())) > M * S:
            return
        lenders = [r for r in self.lists if begins and any(begins[0] is one for one in self.of[r])]
        loan, lent = None, 0
        if lenders and self.random.random() < 0.9:
            loan = rowing.Loan(row=np.int32(self.random.choice(lenders)), pages=(begins[0],))
            lent = int(begins[0].sum())
        need = sum(-(-len(x) // S) for x in lists.values()) - lent
        if self.pages() + need > self.count:
            return
        if self.random.random() < 0.5:  # what it leaves, others may begin with
            begins.append(np.asarray(source.pages.length)[0] // S)
            self.beginnings = [*self.beginnings, (source, lists, begins[-1])][-3:]
        self.rings[row] = own = self.tokens(W)
        k, v, _, age = self.entry(own[None])
        source = put(source, k[0], v[0], age[0], 0)
        before = int(self.cache.pages.n_free)
        self.cache = insert(self.cache, source, np.int32(row), loan)
        assert int(self.cache.pages.n_free) == before - need
        self.lists[row], self.of[row] = {at: set(x) for at, x in lists.items()}, begins
        self.lent += bool(lent)
        self.check("insert")

    def evict(self) -> None:
        """Nothing leaves a list whose pages are lent."""


def test_rows_that_begin_alike_share_their_full_pages():
    history = Lending(Native(), 0)
    history.run(150)
    assert min(history.done[name] for name in ("release", "write", "cut", "resize")) > 8
    assert history.lent > 4
    assert history.shared > 8


def test_rows_come_and_go():
    history = History(Native(), 0)
    history.run(400)
    assert min(history.done[name] for name in ("insert", "release", "write", "evict", "cut", "resize")) > 20


@pytest.mark.slow
@pytest.mark.parametrize("storage", [Native(), Int8(recent=1)], ids=["native", "int8"])
@pytest.mark.parametrize("kind", [History, Lending])
def test_ten_thousand_operations(kind, storage):
    history = kind(storage, 1)
    history.run(10_000)


def test_a_row_that_does_not_fit_says_so():
    source = empty(Native(), 1, 16)
    for _ in range(2):
        history = History(Native(), 2)
        numbers = history.tokens(6)
        source = append(Native(), source, *history.entry(numbers[None]), np.zeros((1, K, 6), np.int32))
    small = dataclasses.replace(empty(Native(), B, 44), pages=empty(Native(), B, 5).pages)
    assert bool(insert(small, source, np.int32(1)).pages.overflow)  # six pages into five
    assert not bool(insert(empty(Native(), B, 6), source, np.int32(1)).pages.overflow)
    short = empty(Native(), B, 44, entries=2)
    assert bool(insert(short, source, np.int32(1)).pages.overflow)  # twelve slots into lists of eight
