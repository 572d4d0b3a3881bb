"""merge: a commutative monoid on partials, differentiable at its corners."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_numerics import assert_close

from benchmarks.kernels.merge import MergeSizes
from pallas_kernels import Unsupported, merge

TEST = {
    "decode_small": MergeSizes(B=2, N=8, T=1, H=64, parts=3),
    "odd": MergeSizes(B=1, N=3, T=5, H=80, parts=2),
}

IMPLS = ("ref", "xla")


def part(seed, shape, empty=0.0):
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(shape.B, shape.N, shape.T, shape.H)).astype(np.float32)
    lse = rng.normal(size=out.shape[:-1]).astype(np.float32) * 5
    gone = rng.random(lse.shape) < empty
    return jnp.asarray(np.where(gone[..., None], 0, out)), jnp.asarray(np.where(gone, -np.inf, lse))


def oracle(parts):
    outs = np.stack([np.asarray(out, np.float64) for out, _ in parts])
    lses = np.stack([np.asarray(lse, np.float64) for _, lse in parts])
    top = np.where(np.isfinite(lses.max(0)), lses.max(0), 0)
    w = np.exp(lses - top)
    total = w.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = (w[..., None] * outs).sum(0) / np.where(total > 0, total, 1)[..., None]
        return out, top + np.log(total)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", TEST)
@pytest.mark.parametrize("empty", [0.0, 0.6, 1.0])
def test_merge_is_attention_over_the_union(impl, name, empty):
    shape = TEST[name]
    parts = [part(i, shape, empty) for i in range(shape.parts)]
    out, lse = merge(parts, impl=impl)
    assert out.dtype == lse.dtype == jnp.float32
    want_out, want_lse = oracle(parts)
    assert_close(out, want_out, shape.parts)
    assert_close(lse, want_lse, shape.parts)


@pytest.mark.parametrize("impl", IMPLS)
def test_merge_is_associative_commutative_and_has_a_unit(impl):
    shape = TEST["decode_small"]
    a, b, c = (part(i, shape, 0.3) for i in range(3))
    unit = part(9, shape, empty=1.0)

    def same(x, y):
        assert_close(x[0], y[0], 3)
        assert_close(x[1], y[1], 3, scale=10)

    whole = merge([a, b, c], impl=impl)
    same(merge([merge([a, b], impl=impl), c], impl=impl), whole)
    same(merge([a, merge([b, c], impl=impl)], impl=impl), whole)
    same(merge([c, a, b], impl=impl), whole)
    for alone in (merge([a], impl=impl), merge([a, unit], impl=impl), merge([unit, a], impl=impl)):
        np.testing.assert_array_equal(alone[0], a[0])
        np.testing.assert_array_equal(alone[1], a[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_merge_ignores_whatever_an_empty_part_holds(impl):
    a = part(0, TEST["decode_small"])
    poisoned = jnp.full_like(a[0], jnp.nan), jnp.full_like(a[1], -jnp.inf)
    out, lse = merge([poisoned, a], impl=impl)
    np.testing.assert_array_equal(out, a[0])
    np.testing.assert_array_equal(lse, a[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_merge_gradients(impl):
    a, b = part(0, TEST["odd"], 0.5), part(1, TEST["odd"], 0.5)

    def loss(parts):
        out, lse = merge(parts, impl=impl)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0))

    grads = jax.grad(loss)([a, b])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    # A directional finite difference, in float64 through the oracle.
    rng = np.random.default_rng(2)
    step = [tuple(rng.normal(size=x.shape) for x in p) for p in (a, b)]

    def moved(eps):
        parts = [
            (np.asarray(o) + eps * do, np.asarray(l) + eps * dl) for (o, l), (do, dl) in zip((a, b), step)
        ]
        out, lse = oracle(parts)
        return np.sum(np.sin(out)) + np.sum(np.cos(lse[np.isfinite(lse)]))

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    ours = sum(float(np.sum(np.asarray(g) * d)) for gs, ds in zip(grads, step) for g, d in zip(gs, ds))
    np.testing.assert_allclose(ours, slope, rtol=1e-4)  # the difference quotient's own error is 1e-5


def test_merge_refuses():
    a = part(0, TEST["odd"])
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    with pytest.raises(ValueError, match="the same in all parts"):
        merge([a, (a[0][:, :1], a[1][:, :1])])
    with pytest.raises(Unsupported, match="mosaic_tpu"):
        merge([a], impl="mosaic_tpu")
    with pytest.raises(ValueError, match="no implementation"):
        merge([a], impl="cuda")
