"""The prototype of one decode kernel a layer: against NumPy in float64, with poison in all that is dead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.phi.api import Summary
from studies.one_kernel import gpu, today, tpu
from studies.one_kernel.arrays import Cache, Sizes, Token

SIZES = Sizes(B=4, K=2, G=2, H=128, W=32, S=16, M=6, F=8)
SEEN = (100, 7, -1, 64)
"""A full ring, one that fills, a row without a token, and a slot at a ring's beginning."""
LENGTHS = ((40, 0), (0, 3), (20, 16), (63, 96))


def made(sizes: Sizes = SIZES, seed: int = 0, poison: float = np.nan) -> tuple[Cache, Token]:
    """A step with ``poison`` in all that is dead: ring slots never written, free pages, ends of lists."""
    b, heads, g, h, w, s, m, f = sizes
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pool = 2 * b * heads * m
    ring_k, ring_v, k_pages, v_pages = normal(b, heads, w, h), normal(b, heads, w, h), *normal(2, pool, s, h)
    seen, length = np.array(SEEN, np.int32), np.array(LENGTHS, np.int32)
    admit = (np.arange(b * heads).reshape(b, heads) % 3 != 1) & (seen >= w)[:, None] & (length < m * s)
    table = rng.permutation(pool)[: b * heads * m].reshape(b, heads, m).astype(np.int32)
    dead = np.ones((pool, s), bool)
    for row, head in np.ndindex(b, heads):
        ring_k[row, head, max(seen[row], 0) :], ring_v[row, head, max(seen[row], 0) :] = poison, poison
        for at in range(length[row, head]):
            dead[table[row, head, at // s], at % s] = False
    k_pages[dead], v_pages[dead] = poison, poison
    shift, weight, values = normal(b, heads, f), np.abs(normal(b, heads, f)) + 0.5, normal(b, heads, f, h)
    shift[0, :, :3], weight[0, :, :3], values[0, :, :3] = -np.inf, 0, 0  # features that hold nothing
    angle = np.maximum(seen, 0)[:, None] * 0.1 ** (np.arange(h) % (h // 2) / h)
    bits = lambda x: jnp.asarray(x, jnp.bfloat16)  # noqa: E731
    cache = Cache(*map(bits, (ring_k, ring_v, k_pages, v_pages)), None)
    token = Token(
        *map(bits, (normal(b, heads * g, h), normal(b, heads, h), normal(b, heads, h))),
        *(jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle))),
        *map(jnp.asarray, (seen, table, length, admit)),
        *(None,) * 3,
    )
    if not f:
        return cache, token
    summary = Summary(*map(jnp.asarray, (shift, weight, values)))
    absorb = jnp.asarray(~admit & (seen >= w)[:, None])
    log_q, log_k = jnp.asarray(normal(b, heads * g, f)), jnp.asarray(normal(b, heads, f))
    return cache._replace(summary=summary), token._replace(absorb=absorb, log_q=log_q, log_k=log_k)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def turned(x, cos, sin) -> np.ndarray:
    """RoPE by rotating pairs, in float64, rounded to what a cache holds."""
    half = x.shape[-1] // 2
    pair = (wide(x)[..., :half] + 1j * wide(x)[..., half:]) * (wide(cos) + 1j * wide(sin))[..., :half]
    return wide(jnp.asarray(np.concatenate([pair.real, pair.imag], -1), jnp.bfloat16))


def oracle(cache: Cache, token: Token):
    """(out, lse, ring k and v, {(page, slot): (k, v)}, summary) after the step, token by token."""
    (b, heads, w, h), s = cache.ring_k.shape, cache.k_pages.shape[1]
    ring_k, ring_v, k_pages, v_pages = map(wide, cache[:4])
    q = turned(token.q, token.cos[:, None], token.sin[:, None])
    k, v = turned(token.k, token.cos[:, None], token.sin[:, None]), wide(token.v)
    g = q.shape[1] // heads
    out, lse, stored, summary = np.zeros(q.shape), np.full(q.shape[:2], -np.inf), {}, {}
    for row, head in np.ndindex(b, heads):
        n, count = int(token.seen[row]), int(token.length[row, head])
        place = [(int(token.table[row, head, i // s]), i % s) for i in range(count + 1) if i < s * 6]
        mine = [(k_pages[at], v_pages[at]) for at in place[:count]]
        old = ring_k[row, head, n % w].copy(), ring_v[row, head, n % w].copy()
        if token.admit[row, head]:
            mine.append(old)
            stored[place[count]] = old
        if n >= 0:
            ring_k[row, head, n % w], ring_v[row, head, n % w] = k[row, head], v[row, head]
        mine += [(ring_k[row, head, i], ring_v[row, head, i]) for i in range(min(n + 1, w))]
        weights = np.array([x for x, _ in mine]).reshape(-1, h) @ q[row, head * g : head * g + g].T * h**-0.5
        terms = np.array([x for _, x in mine]).reshape(-1, h)
        if cache.summary is not None:
            shift, u, sums = (wide(x)[row, head].copy() for x in cache.summary)
            mass = u * np.exp(shift)
            sums = sums * np.exp(shift)[:, None]
            if token.absorb[row, head]:
                e = np.exp(wide(token.log_k)[row, head])
                mass, sums = mass + e, sums + e[:, None] * old[1]
            summary[row, head] = mass, sums
            some = mass > 0
            more = wide(token.log_q)[row, head * g : head * g + g][:, some].T + np.log(mass[some])[:, None]
            weights = np.concatenate([weights, more])
            terms = np.concatenate([terms, sums[some] / mass[some, None]])
        for i in range(g if len(terms) else 0):
            lse[row, head * g + i] = np.logaddexp.reduce(weights[:, i])
            out[row, head * g + i] = np.exp(weights[:, i] - lse[row, head * g + i]) @ terms
    return out, lse, ring_k, ring_v, stored, summary


def check(found, cache: Cache, token: Token) -> None:
    """``found`` is what a step gave for them."""
    out, lse, after = found
    want, want_lse, ring_k, ring_v, stored, summary = oracle(cache, token)
    live = np.asarray(token.seen) >= 0
    np.testing.assert_allclose(wide(out)[live], want[live], atol=0.02)
    np.testing.assert_allclose(wide(lse)[live], want_lse[live], atol=2e-3)
    # Bit for bit: what was written, and that nothing else was.
    for ring, wanted in ((after.ring_k, ring_k), (after.ring_v, ring_v)):
        for row, n in enumerate(np.asarray(token.seen)):
            held = slice(0, max(0, min(n + 1, SIZES.W)))
            np.testing.assert_allclose(wide(ring)[row, :, held], wanted[row, :, held], rtol=2**-7, atol=1e-6)
            others = np.arange(SIZES.W)[held] != n % SIZES.W
            np.testing.assert_array_equal(
                wide(ring)[row, :, held][:, others], wanted[row, :, held][:, others]
            )
    for pages, before, i in ((after.k_pages, cache.k_pages, 0), (after.v_pages, cache.v_pages, 1)):
        new = wide(before).copy()
        for at, old in stored.items():
            new[at] = old[i]
            np.testing.assert_array_equal(wide(pages)[at], old[i])
        old = ~np.isnan(wide(before)).any(-1)
        np.testing.assert_array_equal(wide(pages)[old], new[old])
    for at, (mass, sums) in summary.items():
        shift, weight, values = (wide(x)[at] for x in after.summary)
        np.testing.assert_allclose(weight * np.exp(shift), mass, rtol=1e-5)
        np.testing.assert_allclose(values * np.exp(shift)[:, None], sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_todays_operations_are_the_step(features):
    cache, token = made(SIZES._replace(F=features))
    check(jax.jit(today.step, static_argnames="impl")(cache, token, impl="xla"), cache, token)


@pytest.mark.parametrize("features", [0, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", [tpu, pytest.param(gpu, marks=pytest.mark.slow)])
def test_one_kernel_is_the_step(body, features, monkeypatch):
    monkeypatch.setattr(tpu, "ITEM", 64)
    for name, value in (("TILE", 16), ("RING", 16), ("PROGRAMS", 16), ("LEAST", (16, 16)), ("FEATURES", 16)):
        monkeypatch.setattr(gpu, name, value)
    cache, token = made(SIZES._replace(F=features))
    interpret = compat.tpu_interpreter(detect_races=True) if body is tpu else True
    found = body.step(jax.tree.map(jnp.copy, cache), token, interpret=interpret)
    assert body is gpu or not compat.races_found()
    check(found, cache, token)
