"""Decode-time mass against float64 NumPy: sets of tokens, what they received, and who goes, step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import room

from kvjax import layer
from kvjax.algebra import Eviction, Policy
from kvjax.budgets.uniform import Uniform
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies.h2o import H2O
from kvjax.policies.tova import Tova
from kvjax.types import EMPTY, Heads

PROMPTS, T, STEPS = np.array([14, 9]), 14, 12
N, K, H, TARGET, SINKS = 4, 2, 8, 8, 1
random = np.random.default_rng(3)
Q = 1.5 * random.standard_normal((2, T + STEPS, N, H))
SINK_LOGITS = np.array([2.0, -1.0, 0.5, 3.0])
"""Of the heads' attention sinks, where a model has them."""
KEYS, VALUES = 1.5 * random.standard_normal((2, 2, T + STEPS, K, H))


def heads(at: np.ndarray, sinks: np.ndarray | None = None) -> Heads:
    """Tokens of each row at positions [B, T] (anything where EMPTY)."""
    index = np.maximum(at, 0)[..., None, None]
    q, k, v = (jnp.asarray(np.take_along_axis(x, index, 1), jnp.float32) for x in (Q, KEYS, VALUES))
    own = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    return Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[..., 0, :], sinks=own)


def attend(b: int, n: int, i: int, kept: list[int], sinks: np.ndarray | None = None) -> np.ndarray:
    e = np.exp(KEYS[b, kept, n // (N // K)] @ Q[b, i, n] / np.sqrt(H))
    return e / (e.sum() + (0 if sinks is None else np.exp(sinks[n])))


def simulate(
    eviction: Eviction, recent: int, sinks: np.ndarray | None = None
) -> tuple[list, np.ndarray, np.ndarray]:
    """[step][row][head] kept positions while step is read, what it mixes, and mass after the last step."""
    mass = np.zeros((2, K, T + STEPS))
    out = np.zeros((2, STEPS, N, H))

    def count_attention(b: int, i: int, kept: list[list[int]]) -> None:
        rows = np.zeros((N, T + STEPS))
        for n in range(N):
            rows[n, kept[n // (N // K)]] = attend(b, n, i, kept[n // (N // K)], sinks)
            if i >= PROMPTS[b]:
                out[b, i - PROMPTS[b], n] = rows[n] @ VALUES[b, :, n // (N // K)]
        if isinstance(eviction, H2O):
            mass[b] += rows.reshape(K, N // K, -1).mean(1)
        else:
            mass[b] = rows.mean(0)

    def cut(b: int, h: int, kept: list[int], seen: int) -> list[int]:
        while len(kept) > TARGET:
            free = [p for p in kept if SINKS <= p < seen - recent]
            kept = [p for p in kept if p != min(free, key=lambda p: (mass[b, h, p], -p))]
        return kept

    for b, n in enumerate(PROMPTS):
        for i in range(n):
            count_attention(b, i, [list(range(i + 1))] * K)
    sets = []
    now = [[cut(b, h, list(range(n)), n) for h in range(K)] for b, n in enumerate(PROMPTS)]
    for step in range(STEPS):
        for b, n in enumerate(PROMPTS):
            i = int(n) + step
            now[b] = [cut(b, h, [*now[b][h], i], i + 1) for h in range(K)]
            count_attention(b, i, now[b])
        sets.append([[list(x) for x in row] for row in now])
    return sets, out, mass


def in_chunk(
    eviction: Eviction, recent: int, count: np.ndarray, sinks: np.ndarray | None
) -> list[list[dict[int, float]]]:
    """After the prompt's cut, ``count`` tokens read together: what each kept token has received."""
    last = []
    for b, n in enumerate(PROMPTS):
        mass = np.zeros((K, T + STEPS))

        def count_attention(i: int, kept: list[list[int]], mass: np.ndarray = mass, b: int = b) -> None:
            rows = np.zeros((N, T + STEPS))
            for h in range(N):
                rows[h, kept[h // (N // K)]] = attend(b, h, i, kept[h // (N // K)], sinks)
            if isinstance(eviction, H2O):
                mass += rows.reshape(K, N // K, -1).mean(1)
            else:
                mass[:] = rows.mean(0)

        def cut(h: int, kept: list[int], seen: int, mass: np.ndarray = mass) -> list[int]:
            while len(kept) > TARGET:
                free = [p for p in kept if SINKS <= p < seen - recent]
                kept = [p for p in kept if p != min(free, key=lambda p: (mass[h, p], -p))]
            return kept

        for i in range(n):
            count_attention(i, [list(range(i + 1))] * K)
        kept = [cut(h, list(range(n)), n) for h in range(K)]
        for i in range(n, n + count[b]):
            count_attention(i, [[*x, *range(n, i + 1)] for x in kept])
        kept = [cut(h, [*x, *range(n, n + count[b])], n + count[b]) for h, x in enumerate(kept)]
        last.append([{p: mass[h, p] for p in x} for h, x in enumerate(kept)])
    return last


def received(cache: LayerCache, b: int, h: int, seen: int, w: int) -> dict[int, float]:
    """Position -> mass of everything a KV head holds, in either room."""
    masses = {}
    for i in range(int(cache.pages.length[b, h, 0])):
        where = int(cache.pages.table[b, h, 0, i // 4]), i % 4
        masses[int(cache.pages.pos[where])] = float(cache.pages.meta["eviction.mass"][where])
    for p in range(seen - w, seen):
        masses[p] = float(cache.ring.meta["eviction.mass"][b, h, p % w])
    return masses


@pytest.mark.parametrize(
    ("eviction", "recent", "sinks"),
    [
        (H2O(recent=3), 3, None),
        (H2O(recent=0), 1, None),
        (Tova(), 1, None),
        (H2O(recent=3), 3, SINK_LOGITS),
    ],
)
def test_steps_are_the_papers_loop(eviction, recent, sinks):
    """With attention sinks, mass is taken under the sum that they are part of."""
    policy = Policy(eviction=eviction, budget=Uniform(TARGET, "every_step"), sinks=SINKS)
    w = policy.window(99)
    assert w == recent
    ring = rings.empty(2, K, w, H, jnp.dtype(jnp.float32), policy.keeps)
    cache = LayerCache(ring=ring, pages=room(2, K, H, entries=3, size=4, meta=policy.keeps), summary=None)
    total = jnp.asarray(PROMPTS)

    @jax.jit
    def begin(cache, x, pos):
        site = layer.LayerInfo(policy, {}, 0, 1, None, total)
        _, new = layer.prompt(site, Heads(**x), pos)
        return layer.store(site, cache, new, total)

    @jax.jit
    def step(cache, x, length, active):
        info = layer.LayerInfo(policy, {}, 0, 1, None, total)
        _, (cache, read) = layer.step(info, Heads(**x), cache, length, active)
        return read.out, cache

    at = np.where(np.arange(T) < PROMPTS[:, None], np.arange(T), EMPTY)
    cache = begin(cache, vars(heads(at, sinks)), jnp.asarray(at))
    sets, out, mass = simulate(eviction, recent, sinks)
    for i in range(STEPS):
        x = vars(heads(PROMPTS[:, None] + i, sinks))
        before = cache
        mixed, cache = step(cache, x, total + i, jnp.asarray([True, True]))
        if i == 4:  # a row that takes no part leaves no trace
            _, half = step(before, x, total + i, jnp.asarray([True, False]))
            for name in policy.keeps:
                np.testing.assert_array_equal(half.ring.meta[name][1], before.ring.meta[name][1])
        np.testing.assert_allclose(mixed[:, 0], out[:, i], atol=1e-5)
        for b in range(2):
            for h in range(K):
                masses = received(cache, b, h, PROMPTS[b] + i + 1, w)
                assert masses.keys() == set(sets[i][b][h])
                if i == STEPS - 1:
                    for p, x in masses.items():
                        assert abs(x - mass[b, h, p]) < 1e-5


@pytest.mark.parametrize(
    ("eviction", "recent", "sinks"),
    [(H2O(recent=3), 3, None), (Tova(), 1, None), (H2O(recent=3), 3, SINK_LOGITS)],
)
def test_tokens_that_come_together_give_what_they_give_one_by_one(eviction, recent, sinks):
    policy = Policy(eviction=eviction, budget=Uniform(TARGET, "every_step"), sinks=SINKS)
    ring = rings.empty(2, K, recent, H, jnp.dtype(jnp.float32), policy.keeps)
    cache = LayerCache(ring=ring, pages=room(2, K, H, entries=5, size=4, meta=policy.keeps), summary=None)
    total, count = jnp.asarray(PROMPTS), np.array([9, 4])

    @jax.jit
    def run(cache, x, pos, more):
        site = layer.LayerInfo(policy, {}, 0, 1, None, total)
        _, new = layer.prompt(site, Heads(**x), pos)
        cache = layer.store(site, cache, new, total)
        return layer.chunk(site, Heads(**more), cache, total, jnp.asarray(count))[1]

    at = np.where(np.arange(T) < PROMPTS[:, None], np.arange(T), EMPTY)
    later = heads(PROMPTS[:, None] + np.arange(9), sinks)
    cache = run(cache, vars(heads(at, sinks)), jnp.asarray(at), vars(later))
    right = in_chunk(eviction, recent, count, sinks)
    for b in range(2):
        for h in range(K):
            masses = received(cache, b, h, PROMPTS[b] + count[b], recent)
            assert masses.keys() == right[b][h].keys()
            for p, x in right[b][h].items():
                assert abs(masses[p] - x) < 1e-5
