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
from kvjax import decode, layer, metrics
from kvjax.algebra import Eviction, Policy, PolicyError
from kvjax.budgets.uniform import Uniform
from kvjax.cache import pages as paging
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache import state as states
from kvjax.cache.ring import Entry
from kvjax.cache.state import LayerCache
from kvjax.layer import _demote
from kvjax.policies.h2o import H2O
from kvjax.storage.int4 import Int4
from kvjax.storage.int8 import Int8
from kvjax.types import Heads

B, K, H, S, W, F, TARGET, SINKS, MANY = 3, 2, 4, 4, 3, 7, 12, 1, 5
seeds = st.integers(0, 2**32 - 1)
done: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True, repr=False)
class Worth(Eviction):
    """What a token is worth is given with it; where it comes through the seam, its key's first channel."""

    name = "worth"
    needs = frozenset({"k"})
    keeps = ("worth",)

    def arrive(self, params, seen):
        return {"worth": seen.k[..., 0]}

    def score(self, params, slots):
        return slots.meta["worth"]


def policy(storage) -> Policy:
    return Policy(
        eviction=Worth(), budget=Uniform(TARGET, "every_step"), storage=storage, sinks=SINKS, recent=W
    )


def site(policy: Policy) -> layer.LayerInfo:
    return layer.LayerInfo(policy, {}, 0, 1, None, jnp.zeros(B, jnp.int32))


def empty(policy: Policy) -> LayerCache:
    exact, codes = decode.slot_bounds(policy, 64, MANY)
    rooms = [
        room(B, K, H, entries=-(-most // S), size=S, codec=codec, meta=policy.keeps)
        for codec, most in ((NATIVE, exact), (policy.storage, codes))
    ]
    ring = rings.empty(B, K, W, H, jnp.dtype(jnp.float32), policy.keeps)
    return LayerCache(ring=ring, pages=None, summary=None).with_pools(rooms)


@functools.partial(jax.jit, static_argnums=0)
def arrive(policy, cache, k, v, worth, length, count):
    """A step of one token or a chunk of several, without what is read."""
    pos = jnp.where(jnp.arange(k.shape[2]) < count[:, None], length[:, None] + jnp.arange(k.shape[2]), -1)
    new = Entry(k=k, v=v, pos=pos, admit=jnp.ones(k.shape[:3], bool), meta={"eviction.worth": worth})
    if k.shape[2] == 1:
        cache = layer.admit_or_replace(site(policy), cache, new, length, count)
    else:
        cache = layer.admit(site(policy), cache, rings.leaving(cache.ring, new, length, count))
        cache = dataclasses.replace(cache, ring=rings.put(cache.ring, new, length, count))
    cache = layer.evict(site(policy), cache, length + count, count > 0)
    return _demote.demote(policy, cache, k.shape[2])


@functools.partial(jax.jit, static_argnums=0)
def pack(policy, cache, k, v, worth, bits, count):
    pos = jnp.where(jnp.arange(k.shape[2]) < count[:, None], jnp.arange(k.shape[2]), -1)
    new = Entry(k=k, v=v, pos=pos, admit=bits, meta={"eviction.worth": worth})
    return layer.store(site(policy), cache, new, count)


@jax.jit
def clear(cache, gone):
    return cache.with_pools([paging.clear(pages, gone) for pages in cache.pools])


@jax.jit
def again(cache):
    """Into pools of other sizes and back, all pages renumbered."""
    return cache.with_pools([pool.resize(pool.resize(p, p.count + 3), p.count) for p in cache.pools])


class Machine(RuleBasedStateMachine):
    """Of every KV head: the positions in the ring, in exact pages and in codes; of every row, its tokens."""

    storage = Int8(recent=F)
    slack = 4 / 127  # a few times half a step

    def __init__(self):
        super().__init__()
        self.policy = policy(self.storage)
        self.cache = empty(self.policy)
        self.turns = 0
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

    def random(self, seed):
        """Of this turn alone: tokens of one seed twice would be equal, and whichever goes would be right."""
        self.turns += 1
        return np.random.default_rng((seed, self.turns))

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
        random = self.random(seed)
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
        random, t = self.random(seed), 20
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
        for pages, expected, slack in zip(self.cache.pools, (self.exact, self.codes), (0, self.slack)):
            tiny.owned_once(pages)
            held = tiny.held(pages)
            for at, slots in held.items():
                assert sorted(slots) == sorted(expected[at]), f"{name}: row, head {at}"
                for pos, (k, v, meta) in slots.items():
                    np.testing.assert_allclose(k, self.k[*at, pos], atol=slack)
                    np.testing.assert_allclose(v, self.v[*at, pos], atol=slack)
                    assert meta == self.worth[*at, pos]
        done["aged"] += sum(map(len, self.codes.values()))


class Machine4(Machine):
    storage = Int4(recent=F)
    slack = 2 / 7


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        pytest.param(Machine, 16, id="int8"),
        pytest.param(Machine4, 5, id="int4", marks=pytest.mark.slow),
    ],
)
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
    assert min(done[name] for name in ("one", "many", "clear", "resize", "prompt")) > examples // 2
    assert done["aged"] > 50 * examples


# --- reads, whole lives, bytes -------------------------------------------------------------------


def attended(q, k, v):
    """One query over everything, float64: what it reads, and what each token receives."""
    s = np.asarray(k, np.float64) @ np.asarray(q, np.float64) * H**-0.5
    p = np.exp(s - s.max())
    p /= p.sum()
    return p @ np.asarray(v, np.float64), p


@functools.partial(jax.jit, static_argnums=0)
def step(policy, cache, q, k, v, length, active):
    x = Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[:, :, 0])
    _, (cache, read) = layer.step(site(policy), x, cache, length, active)
    return read.out, cache


def contents(cache, length):
    """Per KV head: position -> (k, v, mass), of the ring and of both rooms."""
    held, ring = tiny.held(*cache.pools), jax.device_get(cache.ring)
    at = np.asarray(rings.positions(jnp.asarray(length), W))
    for (b, h), of_head in held.items():
        for j in np.flatnonzero(at[b] >= 0):
            assert at[b, j] not in of_head
            of_head[at[b, j]] = ring.k[b, h, j], ring.v[b, h, j], ring.meta["eviction.mass"][b, h, j : j + 1]
    return held


def test_a_step_reads_all_rooms_once_and_tells_each_slot_what_it_received():
    random = np.random.default_rng(5)
    chosen = dataclasses.replace(policy(Int8(recent=F)), eviction=H2O(recent=W))
    cache, length, active = empty(chosen), np.zeros(B, np.int32), np.ones(B, bool)
    for i in range(30):
        active[1] = i % 2 == 1  # a row at its own pace
        q = random.standard_normal((B, 1, 2 * K, H)).astype(np.float32)
        k, v = random.standard_normal((2, B, 1, K, H)).astype(np.float32)
        before = contents(cache, length)
        out, cache = step(chosen, cache, q, k, v, length.copy(), active.copy())
        length = length + active
    assert all(int(pages.length.min()) > 0 for pages in cache.pools), "a room is empty: nothing is shown"
    for (b, h), slots in contents(cache, length).items():
        assert len(slots) == TARGET
        group = (2 * h, 2 * h + 1)
        read = [
            attended(q[b, 0, n], *(np.stack([x[i] for x in slots.values()]) for i in (0, 1))) for n in group
        ]
        for n, (right, _) in zip(group, read):
            np.testing.assert_allclose(out[b, 0, n], right, atol=1e-5)
        for at, (pos, (_, _, mass)) in enumerate(slots.items()):
            was = before[b, h][pos][2] if pos in before[b, h] else 0
            np.testing.assert_allclose(mass - was, np.mean([p[at] for _, p in read]), atol=1e-5)


SPEC = "h2o(4) + int8(12) + uniform(24, when=every_step) + sinks(2)"
PROMPTS = [tiny.prompt(n, seed) for seed, n in enumerate((52, 30, 5))]


NEXT = np.asarray([tiny.prompt(12, 100 + row) for row in range(3)])


@functools.cache
def read() -> states.KVState:
    """Prompts of 52, 30 and 5 tokens; not to be donated."""
    policy = kvjax.policy(SPEC)
    return kvjax.prefill(tiny.model(), policy, PROMPTS, context=72, page=8, chunk_size=16)[0]


@functools.cache
def lived() -> tuple[states.KVState, np.ndarray]:
    """After 12 steps, and what they said."""
    policy = kvjax.policy(SPEC)
    return tiny.feed(policy, decode.reserve(policy, tiny.copy(read()), 12, 1), NEXT)


@pytest.mark.slow
def test_a_whole_life_keeps_the_newest_exact():
    """In layer 0, where keys and values do not depend on what was read before."""
    texts = [[*prompt, *new] for prompt, new in zip(PROMPTS, NEXT.tolist())]
    whole, _ = kvjax.prefill(tiny.model(), kvjax.policy("full"), texts, context=72, chunk_size=64)
    state, full = lived()[0], whole.layers[0].ring
    exact, codes = (tiny.held(pages) for pages in state.layers[0].pools)
    for b, h in np.ndindex(3, 2):
        seen = (52, 30, 5)[b] + 12
        assert len(exact[b, h]) == 8
        assert len(exact[b, h]) + len(codes[b, h]) == min(24, seen) - 4
        assert max(codes[b, h]) < min(exact[b, h])
        for slots, slack in ((exact[b, h], 1e-6), (codes[b, h], 0.05)):
            for pos, (k, v, _) in slots.items():
                np.testing.assert_allclose(k, full.k[b, h, pos], atol=slack)
                np.testing.assert_allclose(v, full.v[b, h, pos], atol=slack)


@pytest.mark.slow
def test_bytes_of_both_rooms_by_hand():
    state = lived()[0]
    nbytes = kvjax.nbytes(state)
    slot, page, meta = 2 * 8 * 4 + 4, 2 * 8 * 4, 4  # keys and values of 8 float32 channels; scales; mass
    codes = 2 * 8 + 4
    slots = [20 - 8, 20 - 8, 17 - 4 - 8]
    assert metrics.STORES == ("ring", "pages", "demoted", "summary")
    assert (nbytes.live[..., 1] == 3 * 8 * (slot + meta)).all()
    assert (nbytes.live[..., 2] == sum(slots) * (codes + meta) + sum(-(-n // 8) for n in slots) * page).all()
    assert nbytes.allocated.sum() == sum(x.nbytes for x in jax.tree.leaves(state.layers))
    for rooms, allocated in zip(state.layers, nbytes.allocated):
        assert (rooms.pages.k.dtype, rooms.demoted.k.dtype) == (jnp.float32, jnp.int8)
        assert allocated[2] == sum(x.nbytes for x in jax.tree.leaves(rooms.demoted))
    slots = np.asarray(metrics.live_slots(state))
    assert (slots == np.asarray([24, 24, 17])[:, None]).all()
    assert (np.asarray(metrics.present(state)).sum(axis=-1) == slots).all()


@pytest.mark.slow
def test_pools_of_both_rooms_are_reserved_shrunk_and_forked():
    chosen, state = kvjax.policy(SPEC), tiny.copy(read())
    assert [tuple(pages.count for pages in x.pools) for x in state.layers] == [(6, 8)] * 2  # as many as owned
    fork = states.fork(state, 0, 3)
    fork, state = (decode.reserve(chosen, x, 12, 1) for x in (fork, state))
    # Of 9 exact slots, one just come, and 13 codes (24 less 12, one to come) in pages of 8: 2 per KV head.
    for grown in (*fork.layers, *state.layers):
        assert [pages.count for pages in grown.pools] == [12, 12]
    thrice = tiny.feed(chosen, fork, np.stack([NEXT[0]] * 3))[1]
    np.testing.assert_allclose(thrice, np.stack([lived()[1][0]] * 3), atol=2e-4)


@pytest.mark.slow
def test_more_text_goes_through_exact_pages_first():
    """``extend``: a chunk of 16 leaves 16 tokens at once, more than exact pages hold afterwards."""
    chosen, state = kvjax.policy(SPEC), tiny.copy(read())
    state, _ = decode.extend(tiny.model(), chosen, state, [tiny.prompt(n, 7) for n in (18, 3, 16)])
    for cache in state.layers:
        exact, codes = (tiny.held(pages) for pages in cache.pools)
        for pages in cache.pools:
            tiny.owned_once(pages)
        for b, h in np.ndindex(3, 2):
            assert (len(exact[b, h]), len(codes[b, h])) == (8, (12, 12, 9)[b])
            assert max(codes[b, h]) < min(exact[b, h])


def test_a_ring_that_holds_the_newest_needs_no_second_room():
    for spec in (
        "knorm + uniform(24, when=every_step) + int8(12) + recent(12)",  # the ring protects as many
        "int8(12)",
        "snapkv(8) + uniform(24) + int8(12)",  # nobody goes while decoding: a wider ring
    ):
        state = decode.empty(
            tiny.model().network, kvjax.policy(spec), rows=1, context=72, dtype=jnp.float32, page=8
        )
        assert state.layers[0].ring.window == 12
        assert state.layers[0].demoted is None
        assert state.layers[0].pages.k.dtype == jnp.int8


def test_what_may_be_evicted_is_not_protected():
    """More exact tokens than the budget are no contradiction; more protected ones are."""
    chosen = kvjax.policy("knorm + uniform(8, when=every_step) + int8(12) + recent(4)")
    assert (chosen.window(72), chosen.exact_slots(4), decode.slot_bounds(chosen, 72, 1)) == (4, 8, (5, 0))
    with pytest.raises(PolicyError, match=r"8 slots, fewer than the 9 protected"):
        kvjax.policy("knorm + uniform(8, when=every_step) + int8(12) + recent(9)")
    with pytest.raises(PolicyError, match=r"8 slots, fewer than the 12 protected"):
        kvjax.policy("knorm + uniform(8) + int8(12)")


def test_a_selection_cannot_choose_in_two_rooms():
    parts = "knorm + uniform(40, when=every_step) + quest(3, chunk=4, recent=8)"
    with pytest.raises(PolicyError, match=r"quest.*one list of pages.*int8\(12\).*Use native"):
        kvjax.policy(f"{parts} + int8(12)")
    kvjax.policy(f"{parts} + int8(8)")
    kvjax.policy("knorm + uniform(40) + quest(3, chunk=4, recent=8) + int8(12)")
