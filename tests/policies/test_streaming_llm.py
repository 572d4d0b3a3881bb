"""StreamingLLM at one layer: at every length the room holds the sinks and the last W, and reads just them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import contents, room
from tiny import owned_once

from kvjax import layer
from kvjax.algebra import Policy, PolicyError
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies.streaming_llm import Window
from kvjax.types import Heads

ROWS, N, K, H, W, SINKS = 3, 4, 2, 4, 5, 3
LENGTHS = np.array([18, 7, 2])
POLICY = Policy(admission=Window(W), sinks=SINKS)
SITE = layer.LayerInfo(POLICY, {}, 0, 1, None, jnp.asarray(LENGTHS))
random = np.random.default_rng(0)
Q = random.standard_normal((ROWS, 18, N, H))
KEYS, VALUES = random.standard_normal((2, ROWS, 18, K, H))


def heads(begin: int, t: int) -> tuple[np.ndarray, ...]:
    """q, k, v of t tokens from ``begin`` on; zeros behind the text's end."""
    texts = [np.pad(x, ((0, 0), (0, t), (0, 0), (0, 0))) for x in (Q, KEYS, VALUES)]
    return tuple(x[:, begin : begin + t].astype(np.float32) for x in texts)


def as_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> Heads:
    return Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[..., 0, :])


def empty() -> LayerCache:
    ring = rings.empty(ROWS, K, W, H, jnp.dtype(jnp.float32))
    return LayerCache(ring=ring, pages=room(ROWS, K, H, entries=1, size=4), summary=None)


def held(cache: LayerCache, b: int, h: int, length: int) -> dict[int, np.ndarray]:
    """Position -> key of everything that the KV head still has, in either room."""
    pos, k, v = contents(cache.pages, b, h)
    keys = {int(p): np.concatenate([x, y]) for p, x, y in zip(pos, k, v)}
    for p in range(max(length - W, 0), length):  # the ring: position p lies in slot p mod W
        assert p not in keys
        keys[p] = np.concatenate([cache.ring.k[b, h, p % W], cache.ring.v[b, h, p % W]])
    return keys


def check(cache: LayerCache, lengths: np.ndarray) -> None:
    owned_once(cache.pages)
    cache = jax.device_get(cache)
    for b, length in enumerate(lengths):
        right = {p for p in range(length) if p < SINKS or p >= length - W}
        for h in range(K):
            keys = held(cache, b, h, int(length))
            assert set(keys) == right
            for p, x in keys.items():
                np.testing.assert_array_equal(x, np.float32([*KEYS[b, p, h], *VALUES[b, p, h]]))


def reads(b: int, i: int) -> np.ndarray:
    """Attention of query i over the sinks and the last W of its past."""
    see = [j for j in range(i + 1) if i - j < W or j < SINKS]
    out = np.zeros((N, H))
    for n in range(N):
        s = KEYS[b, see, n // (N // K)] @ Q[b, i, n] / np.sqrt(H)
        e = np.exp(s - s.max())
        out[n] = e / e.sum() @ VALUES[b, see, n // (N // K)]
    return out


@jax.jit
def chunk(cache: LayerCache, qkv: tuple, before: jax.Array, count: jax.Array) -> tuple:
    return layer.chunk(SITE, as_heads(*qkv), cache, before, count)


@jax.jit
def step(cache: LayerCache, qkv: tuple, before: jax.Array, active: jax.Array) -> tuple:
    _, (cache, read) = layer.step(SITE, as_heads(*qkv), cache, before, active)
    return read.out, cache


@pytest.mark.parametrize("size", [4, 9])
def test_prompt_in_chunks_leaves_sinks_and_the_last_w(size):
    cache = empty()
    for begin in range(0, 18, size):
        count = np.clip(LENGTHS - begin, 0, size)
        before = jnp.asarray(np.minimum(LENGTHS, begin))
        out, cache = chunk(cache, heads(begin, size), before, jnp.asarray(count))
        check(cache, np.minimum(LENGTHS, begin + size))
        for b in range(ROWS):
            for i in range(count[b]):
                np.testing.assert_allclose(out[b, i], reads(b, begin + i), atol=1e-5)


def test_step_by_step_too():
    cache = empty()
    for i in range(18):
        active = i < LENGTHS
        before = np.minimum(LENGTHS, i)
        out, cache = step(cache, heads(i, 1), jnp.asarray(before), jnp.asarray(active))
        check(cache, np.minimum(LENGTHS, i + 1))
        for b in np.flatnonzero(active):
            np.testing.assert_allclose(out[b, 0], reads(b, i), atol=1e-5)


def test_nobody_but_the_sinks_is_admitted():
    x, pos = as_heads(*map(jnp.asarray, heads(0, 9))), jnp.broadcast_to(jnp.arange(9), (ROWS, 9))
    new = layer.arriving(SITE, x, pos, layer.observe(SITE, x, pos))
    np.testing.assert_array_equal(new.admit, np.broadcast_to(np.arange(9) < SINKS, (ROWS, K, 9)))


def test_without_sinks_no_pages_are_needed():
    assert not Policy(admission=Window(W)).paged(100)
    assert POLICY.paged(100)
    with pytest.raises(PolicyError, match="is not a valid window"):
        Window(0)
