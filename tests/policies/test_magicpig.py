"""MagicPIG against NumPy: codes, who is sampled, how probable that was; in the mean full attention."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_oracle import ALL, NATIVE, append, contents, entry, observe, room

import kvjax
from kvjax import layer
from kvjax.algebra import Policy, PolicyError
from kvjax.cache import ring as rings
from kvjax.cache.pages import Pages
from kvjax.cache.state import LayerCache
from kvjax.cache.zeros import of_slots, zeros
from kvjax.policies.magicpig import SETTINGS, MagicPIG
from kvjax.types import EMPTY
from pallas_kernels import ragged_decode
from pallas_kernels.ragged_decode import xla

ROWS, N, K, H, SIZE, ENTRIES, T = 2, 4, 2, 6, 8, 4, 27
G = N // K
PIG = MagicPIG(3, 9, seed=5)
random = np.random.default_rng(0)
KEYS, VALUES = random.standard_normal((2, ROWS, K, T, H))
QUERIES = random.standard_normal((ROWS, N, H)).astype(np.float32)
WHICH = np.where(np.arange(T) < np.array([[27, 14], [5, 0]])[..., None], 0, EMPTY)


def filled(part: MagicPIG) -> Pages:
    """Pages with what the part keeps of each key."""
    seen = observe((T, T), T, k=KEYS)
    kept = part.arrive(None, seen)
    meta = {f"selection.{name}": np.asarray(x) for name, x in kept.items()}
    pages = room(ROWS, K, H, entries=ENTRIES, size=SIZE, meta=tuple(meta))
    kinds = of_slots((pages.count, SIZE), meta, {"selection.code": part.arrays["code"]})
    pages = dataclasses.replace(pages, meta=zeros(**kinds))
    new = dataclasses.replace(entry(KEYS, VALUES), meta=meta)
    return jax.device_get(append(pages, NATIVE, ALL, new, jnp.asarray(WHICH)))


def select(part: MagicPIG, pages: Pages):
    total = jnp.full(ROWS, 100)
    return part.select(None, jnp.asarray(QUERIES), pages, 0, total, 100)


def probability(q: np.ndarray, k: np.ndarray, bits: int, tables: int) -> np.ndarray:
    """Of two collisions or more, summed over how many there are; float64."""
    cosine = k @ q / np.linalg.norm(q) / np.linalg.norm(k, axis=-1)
    u = (1 - np.arccos(cosine) / np.pi) ** bits
    return sum(math.comb(tables, j) * u**j * (1 - u) ** (tables - j) for j in range(2, tables + 1))


def test_codes_are_signs_of_products_with_the_directions():
    from kvjax.policies.magicpig import _directions

    actual = np.asarray(PIG.codes(jnp.asarray(QUERIES)))
    planes = _directions(5, H, 9, 3).astype(np.float64)
    sign = np.einsum("...h,hlb->...lb", QUERIES.astype(np.float64), planes) > 0
    np.testing.assert_array_equal(actual, (sign * [1, 2, 4]).sum(-1))
    assert actual.dtype == np.uint16


def test_who_is_sampled_and_with_what_bias():
    pages = filled(PIG)
    picked = select(PIG, pages)
    bias = np.asarray(picked.bias).reshape(ROWS, N, -1)
    codes_q = np.asarray(PIG.codes(jnp.asarray(QUERIES)))
    for b in range(ROWS):
        for n in range(N):
            keys = contents(pages, b, n // G)[1]
            hits = (np.asarray(PIG.codes(jnp.asarray(keys))) == codes_q[b, n]).sum(-1)
            right = np.where(hits >= 2, -np.log(probability(QUERIES[b, n], keys, 3, 9)), -np.inf)
            np.testing.assert_allclose(bias[b, n, : len(keys)], right, rtol=2e-4, atol=2e-4)
            assert (bias[b, n, len(keys) :] == -np.inf).all()
        shared = np.asarray(picked.slots)[b].reshape(K, -1)
        np.testing.assert_array_equal(shared, (bias[b].reshape(K, G, -1) > -np.inf).any(1))


@pytest.mark.parametrize(("bits", "tables"), [*SETTINGS.values(), (3, 9)])
def test_log_probabilities_are_right_wherever_anything_is_sampled(bits, tables):
    cosine = np.linspace(-0.999, 0.999, 101)
    right = probability(np.array([1.0, 0]), np.stack([cosine, np.sqrt(1 - cosine**2)], 1), bits, tables)
    actual = np.asarray(MagicPIG(bits, tables).log_probability(jnp.asarray(cosine, jnp.float32)))
    some = right > 1e-9
    np.testing.assert_allclose(actual[some], np.log(right[some]), rtol=1e-3, atol=2e-3)
    assert np.isfinite(actual).all()


def test_the_mean_over_seeds_is_full_attention():
    """Both sums of the softmax, within four standard errors of what 120 draws of the directions gave."""
    sums = []
    for seed in range(120):
        part = MagicPIG(3, 9, seed=seed)
        pages = filled(part)
        bias = np.asarray(select(part, pages).bias, np.float64).reshape(ROWS, N, -1)
        of_seed = []
        for b, n in ((0, 0), (0, 1), (0, 2), (1, 1)):
            _, keys, values = contents(pages, b, n // G)
            weight = np.exp(keys @ QUERIES[b, n] / np.sqrt(H) + bias[b, n, : len(keys)])
            of_seed.append([weight.sum(), *(weight @ values)])
        sums.append(of_seed)
    drawn = np.asarray(sums)
    error = drawn.std(axis=0) / np.sqrt(len(drawn))
    for i, (b, n) in enumerate(((0, 0), (0, 1), (0, 2), (1, 1))):
        _, keys, values = contents(filled(PIG), b, n // G)
        weight = np.exp(keys @ QUERIES[b, n] / np.sqrt(H))
        right = np.array([weight.sum(), *(weight @ values)])
        assert (np.abs(drawn[:, i].mean(0) - right) < 4 * error[i]).all()
        assert (error[i][0] < 0.1 * right[0]).all(), "too few draws to say anything"


def test_a_read_is_the_estimator():
    pages = filled(PIG)
    site = layer.LayerInfo(Policy(selection=PIG), {}, 0, 2, None, jnp.full(ROWS, 100))
    cache = LayerCache(ring=rings.empty(ROWS, K, 2, H, jnp.dtype(jnp.float32)), pages=pages, summary=None)

    @functools.partial(jax.jit, static_argnums=2)
    def read(cache, q, mass):
        result = layer.read_pages(site, cache, q, by=site.policy.selection, with_mass=mass)
        return result.partials, result.mass

    ((out, lse),), _ = read(cache, QUERIES[:, :, None], False)
    (again,), (mass,) = read(cache, QUERIES[:, :, None], True)
    np.testing.assert_allclose(again[0], out, atol=1e-6)
    bias = np.asarray(select(PIG, pages).bias).reshape(ROWS, N, -1)
    for b in range(ROWS):
        for n in range(N):
            _, keys, values = contents(pages, b, n // G)
            s = keys @ QUERIES[b, n] / np.sqrt(H) + bias[b, n, : len(keys)]
            total = np.logaddexp.reduce(s) if len(s) else -np.inf
            np.testing.assert_allclose(lse[b, n, 0], total, rtol=1e-5)
            p = np.exp(s - total) if np.isfinite(total) else np.zeros(len(s))
            np.testing.assert_allclose(out[b, n, 0], p @ values if len(s) else np.zeros(H), atol=1e-5)
            np.testing.assert_allclose(np.asarray(mass)[b, n, 0].reshape(-1)[: len(s)], p, atol=1e-5)


@pytest.mark.parametrize("at_once", [1 << 21, 0])
def test_a_biased_read_is_its_definition(monkeypatch, at_once):
    monkeypatch.setattr(xla, "AT_ONCE", at_once)
    jax.clear_caches()
    pages = filled(PIG)
    q = random.standard_normal((ROWS, N, 2, H)).astype(np.float32)
    bias = np.where(
        random.random((ROWS, N, ENTRIES, SIZE)) < 0.3, -np.inf, 5 * random.random((ENTRIES, SIZE))
    )
    arguments = q, pages.k, pages.v, pages.table[:, :, 0], pages.length[:, :, 0]
    more = {"bias": jnp.asarray(bias, jnp.float32), "softcap": 3.0, "mass": True}
    actual, right = (ragged_decode(*arguments, **more, impl=impl) for impl in ("xla", "ref"))
    for left, expected in zip(actual, right):
        np.testing.assert_allclose(left, expected, atol=1e-5)
    keys = contents(pages, 0, 0)[1]
    s = 3 * np.tanh(keys @ q[0, 0, 0] / np.sqrt(H) / 3) + bias[0, 0].reshape(-1)[: len(keys)]
    np.testing.assert_allclose(actual[1][0, 0, 0], np.logaddexp.reduce(s), rtol=1e-5)
    with pytest.raises(ValueError, match="whole lists"):
        ragged_decode(*arguments, bias=more["bias"][:, :, :1])


@pytest.mark.parametrize("call", [{"bits": 0}, {"bits": 17}, {"tables": 1}, {"seed": -1}, {"tail": -1}])
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(PolicyError, match=r"is not a valid (number of|seed)"):
        MagicPIG(**call)


def test_beside_a_completion_it_is_refused():
    with pytest.raises(PolicyError, match=r"phi\(8\) would count twice beside magicpig"):
        kvjax.policy("magicpig + phi(8)")
