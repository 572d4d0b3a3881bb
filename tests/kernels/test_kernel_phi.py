"""phi against NumPy: building, joining, subtracting and evaluating summaries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_sizes import PHI, PHI_BLOCKS

from pallas_kernels import Unsupported, merge
from pallas_kernels.phi import xla
from pallas_kernels.phi.api import FLOOR, phi_build, phi_evaluate, phi_subtract
from pallas_kernels.phi.ref import Summary

IMPLS = ("ref", "xla")


def case(shape, seed=0, dtype=jnp.float32, live=0.8):
    """Tokens of which some are absent and hold NaN, and the first R of those present."""
    rng = np.random.default_rng(seed)
    b, n, heads, t, s, f, h, r = shape
    log_q, log_k = rng.normal(size=(b, n, t, f)), 3 * rng.normal(size=(b, heads, s, f))
    v = rng.normal(size=(b, heads, s, h))
    there = rng.random((b, heads, s)) < live
    log_k, v = (np.where(there[..., None], x, np.nan) for x in (log_k, v))
    read = there & (np.cumsum(there, axis=-1) <= r)
    return [jnp.asarray(x, dtype) for x in (log_q, log_k, v)], jnp.asarray(there), jnp.asarray(read)


def oracle(log_q, log_k, v, there):
    """Attention whose score of a pair is log sum_f phi_q phi_k: (out, lse) in float64."""
    log_q, log_k, v = (np.asarray(x).astype(np.float64) for x in (log_q, log_k, v))
    (b, n, t, _), heads = log_q.shape, log_k.shape[1]
    out, lse = np.zeros((b, n, t, v.shape[-1])), np.full((b, n, t), -np.inf)
    for row, head, i in np.ndindex(b, n, t):
        kv = head // (n // heads)
        at = np.flatnonzero(np.asarray(there)[row, kv])
        if len(at):
            s = np.logaddexp.reduce(log_q[row, head, i] + log_k[row, kv, at], axis=-1)
            lse[row, head, i] = np.logaddexp.reduce(s)
            out[row, head, i] = np.exp(s - lse[row, head, i]) @ v[row, kv, at]
    return out, lse


def summary_oracle(log_k, v, there):
    """(m, u, T) in float64, token after token."""
    (b, heads, _, f), h = log_k.shape, v.shape[-1]
    m, u, total = np.full((b, heads, f), -np.inf), np.zeros((b, heads, f)), np.zeros((b, heads, f, h))
    log_k, v = (np.asarray(x).astype(np.float64) for x in (log_k, v))
    for row, head in np.ndindex(b, heads):
        for i in np.flatnonzero(np.asarray(there)[row, head]):
            m[row, head] = np.maximum(m[row, head], log_k[row, head, i])
        for i in np.flatnonzero(np.asarray(there)[row, head]):
            e = np.exp(log_k[row, head, i] - m[row, head])
            u[row, head] += e
            total[row, head] += e[:, None] * v[row, head, i]
    return m, u, total


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        *(("xla", name) for name in ("g1_h32", "g4_h64")),
        *(pytest.param(i, n, marks=pytest.mark.slow) for i in IMPLS for n in PHI),
    ],
)
def test_small_shapes(impl, name):
    shape = PHI[name]
    (log_q, log_k, v), there, read = case(shape)
    whole = phi_build(log_k, v, there=there, impl=impl)
    for ours, wanted in zip(whole, summary_oracle(log_k, v, there)):
        assert ours.dtype == jnp.float32
        assert_close(ours, wanted, shape.S)
    for actual, wanted in zip(phi_evaluate(whole, log_q, impl=impl), oracle(log_q, log_k, v, there)):
        assert actual.dtype == jnp.float32
        assert_close(actual, wanted, shape.S)
    kept = check_rest(phi_subtract(whole, log_k, v, there=read, impl=impl), whole, log_k, v, there & ~read)
    assert kept.any() or shape.R + 1 >= shape.S * 0.8


def check_rest(rest, whole, log_k, v, there):
    """u and T of what is left, up to rounding of what was taken away; where u is clamped, at the floor."""
    m, u, total = summary_oracle(log_k, v, there)
    scale = np.exp(m - np.asarray(whole.shift, np.float64))
    kept = u * scale > 1e-3 * np.asarray(whole.weight)
    rounding = 4 * float(np.max(whole.weight))
    floor = FLOOR * np.asarray(whole.weight)
    assert_close(rest.weight, np.maximum(u * scale, floor), log_k.shape[2], rounding)
    assert_close(rest.values, total * scale[..., None], log_k.shape[2], rounding)
    np.testing.assert_array_equal(rest.shift, whole.shift)
    assert (np.asarray(rest.weight) >= floor).all()
    return kept


def test_many_tokens_go_in_blocks():
    assert PHI_BLOCKS.S > 2 * xla.BLOCK
    (log_q, log_k, v), there, read = case(PHI_BLOCKS)
    whole = phi_build(log_k, v, there=there, impl="xla")
    for actual, wanted in zip(phi_evaluate(whole, log_q, impl="xla"), oracle(log_q, log_k, v, there)):
        assert_close(actual, wanted, PHI_BLOCKS.S)
    rest = phi_subtract(whole, log_k, v, there=read, impl="xla")
    check_rest(rest, whole, log_k, v, there & ~read)
    again = phi_subtract(phi_build(log_k, v, there=there, impl="xla"), log_k, v, there=read, impl="xla")
    for first, second in zip(rest, again):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_all_minus_a_part_is_the_rest(impl):
    """With enough left of every feature, and merged with the part it is the attention over everything."""
    shape = PHI["g4_h64"]
    (log_q, log_k, v), there, read = case(shape)
    log_k = log_k / 3
    whole = phi_build(log_k, v, there=there, impl=impl)
    rest = phi_subtract(whole, log_k, v, there=read, impl=impl)
    alone = phi_build(log_k, v, there=there & ~read, impl=impl)
    left, wanted = phi_evaluate(rest, log_q, impl=impl), phi_evaluate(alone, log_q, impl=impl)
    part = phi_evaluate(phi_build(log_k, v, there=read, impl=impl), log_q, impl=impl)
    joined, everything = merge([left, part]), oracle(log_q, log_k, v, there)
    for pair in (left, wanted), (joined, everything):
        for a, b in zip(*pair):
            assert_close(a, b, shape.S, 4)
    assert np.abs(np.asarray(left[0] - part[0])).max() > 0.1


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_absorbing_piece_by_piece_is_absorbing_at_once(impl):
    """Pieces whose largest features differ widely, so that every join changes the shift of some."""
    shape = PHI["g1_h32"]
    (log_q, log_k, v), there, _ = case(shape)
    log_k = log_k * 20
    summary = None
    for piece in (slice(0, 1), slice(1, 9), slice(9, None)):
        at = (slice(None), slice(None), piece)
        summary = phi_build(log_k[at], v[at], there=there[at], onto=summary, impl=impl)
    at_once = phi_build(log_k, v, there=there, impl=impl)
    np.testing.assert_array_equal(summary.shift, at_once.shift)
    assert_close(summary.weight, at_once.weight, shape.S)
    assert_close(summary.values, at_once.values, shape.S)
    for a, b in zip(phi_evaluate(summary, log_q, impl=impl), oracle(log_q, log_k, v, there)):
        assert_close(a, b, shape.S, 20)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_absorbed_is_the_empty_partial(impl):
    shape = PHI["g1_h32"]
    (log_q, log_k, v), _, _ = case(shape, live=0.0)
    nobody = jnp.zeros(v.shape[:3], bool)
    empty = phi_build(log_k, v, there=nobody, impl=impl)
    np.testing.assert_array_equal(empty.shift, -np.inf)
    again = phi_build(log_k, v, there=nobody, onto=empty, impl=impl)
    for summary in (empty, again, phi_subtract(empty, log_k, v, there=nobody, impl=impl)):
        out, lse = phi_evaluate(summary, log_q, impl=impl)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
    if impl == "xla":
        loss = jax.jit(jax.grad(lambda s: merge([phi_evaluate(s, log_q, impl=impl)] * 2)[0].sum()))
        assert all(np.isfinite(g).all() for g in loss(empty))


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_subtracting_everything_leaves_next_to_nothing(impl):
    shape = PHI["g1_h128"]
    (log_q, log_k, v), there, _ = case(shape)
    whole = phi_build(log_k, v, there=there, impl=impl)
    out, lse = phi_evaluate(phi_subtract(whole, log_k, v, there=there, impl=impl), log_q, impl=impl)
    full = phi_evaluate(whole, log_q, impl=impl)[1]
    np.testing.assert_allclose(lse - full, np.log(FLOOR), atol=1e-3)
    assert np.abs(np.asarray(out)).max() < 4 * float(jnp.nanmax(jnp.abs(v)))


@jax.jit
def plain_way(log_q, log_k, v):
    """What anyone would write, in the arrays' own dtype; one head group."""
    s = jax.nn.logsumexp(log_q[:, :, :, None] + log_k[:, :, None], axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1), v), jax.nn.logsumexp(s, axis=-1)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_bfloat16_is_as_good_as_the_plain_way(impl):
    shape = PHI["g1_h128"]
    (log_q, log_k, v), there, _ = case(shape, dtype=jnp.bfloat16, live=1.0)
    plain = plain_way(log_q, log_k, v)
    ours = phi_evaluate(phi_build(log_k, v, there=there, impl=impl), log_q, impl=impl)
    for a, b, exact in zip(ours, plain, oracle(log_q, log_k, v, there)):
        assert_as_good_as_plain(a, b, exact, shape.S)


def gradients(f, *arrays):
    """Of a scalar that weighs every output differently."""
    actual, back = jax.vjp(f, *arrays)
    return back((jnp.cos(actual[0]), jnp.sin(actual[1])))


@pytest.mark.parametrize("name", ["blocked", pytest.param("g4_h64", marks=pytest.mark.slow)])
def test_gradients_are_those_of_dense_attention(name):
    shape = PHI_BLOCKS if name == "blocked" else PHI[name]
    arrays, there, _ = case(shape, live=1.0)
    group = shape.N // shape.K

    def dense(log_q, log_k, v):
        return plain_way(log_q, *(jnp.repeat(x, group, axis=1) for x in (log_k, v)))

    def ours(log_q, log_k, v):
        return phi_evaluate(phi_build(log_k, v, there=there, impl="xla"), log_q, impl="xla")

    actual, wanted = (jax.jit(functools.partial(gradients, f))(*arrays) for f in (ours, dense))
    for a, b in zip(actual, wanted):
        assert_close(a, b, shape.S * shape.N)
    assert float(jnp.abs(wanted[1]).max()) > 1e-3


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_any_tokens_in_any_two_parts(seed, live):
    shape = PHI["g4_h64"]
    (log_q, log_k, v), there, _ = case(shape, seed, live=live)
    some = there & jnp.asarray(np.random.default_rng(seed + 1).random(there.shape) < 0.5)
    first = phi_build(log_k, v, there=some, impl="xla")
    both = phi_build(log_k, v, there=there & ~some, onto=first, impl="xla")
    for ours, wanted in zip(phi_evaluate(both, log_q, impl="xla"), oracle(log_q, log_k, v, there)):
        assert_close(ours, wanted, shape.S)


def test_refusals():
    (log_q, log_k, v), there, _ = case(PHI["g1_h32"])
    whole = phi_build(log_k, v, there=there)
    assert isinstance(whole, Summary)
    with pytest.raises(ValueError, match="needs log_k"):
        phi_build(log_k, v[:, :, 1:], there=there)
    with pytest.raises(ValueError, match="needs log_k"):
        phi_build(log_k, v, there=there[0])
    with pytest.raises(ValueError, match="the summary holds"):
        phi_subtract(whole, log_k[..., 1:], v, there=there)
    with pytest.raises(ValueError, match="floor=0"):
        phi_subtract(whole, log_k, v, there=there, floor=0)
    with pytest.raises(ValueError, match="multiple of K"):
        phi_evaluate(whole, log_q[:, :1])
    with pytest.raises(ValueError, match="names no implementation"):
        phi_evaluate(whole, log_q, impl="gpu")
    assert issubclass(Unsupported, ValueError)
