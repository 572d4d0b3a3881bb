"""gated and its gradients against NumPy and against jax's gradient of dense attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiled_in_full
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import check_refusals
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_sizes import GATED_BLOCKS, SELF_ATTENTION

from pallas_kernels import blockwise
from pallas_kernels.gated.api import gated

IMPLS = ("ref", "xla")


def extra(cases):
    """Further parameters, for the slow run."""
    return [pytest.param(*x, marks=pytest.mark.slow) for x in cases]


def case(shape, seed=0, dtype=jnp.float32, ragged=True):
    """q, k, v, log_gate of rows of differing length, NaN past the end; some gates closed, some wide open."""
    rng = np.random.default_rng(seed)
    b, n, heads, t, h, _ = shape
    q, k, v = rng.normal(size=(b, n, t, h)), *rng.normal(size=(2, b, heads, t, h))
    gate = np.log(rng.random((b, heads, t)))
    gate[rng.random(gate.shape) < 0.1] = -30
    gate[rng.random(gate.shape) < 0.1] = 0
    lengths = None
    if ragged:
        lengths = np.array([t - 2, 1][:b])
        past = np.arange(t) >= lengths[:, None]
        q, k, v = (np.where(past[:, None, :, None], np.nan, x) for x in (q, k, v))
        gate = np.where(past[:, None], np.nan, gate)
        lengths = jnp.asarray(lengths, jnp.int32)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return [*arrays, jnp.asarray(gate, jnp.float32)], lengths


def oracle(q, k, v, log_gate, lengths, window, softcap=None, scale=None):
    """(out, lse) in float64, one query at a time."""
    (b, n, t, h), heads = q.shape, k.shape[1]
    q, k, v, gate = (np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, k, v, log_gate))
    out, lse = np.zeros((b, n, t, h)), np.full((b, n, t), -np.inf)
    for row, head, i in np.ndindex(b, n, t):
        if lengths is not None and i >= lengths[row]:
            continue
        kv, j = head // (n // heads), np.arange(i + 1)
        s = k[row, kv, j] @ q[row, head, i] * (h**-0.5 if scale is None else scale)
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        s = s + np.where(i - j < window, 0, gate[row, kv, j])
        lse[row, head, i] = np.logaddexp.reduce(s)
        out[row, head, i] = np.exp(s - lse[row, head, i]) @ v[row, kv, j]
    return out, lse


@pytest.mark.parametrize(
    ("impl", "name"),
    [("ref", "g1_h32"), ("xla", "g8_h96"), *extra((i, n) for i in IMPLS for n in SELF_ATTENTION)],
)
def test_small_shapes(impl, name):
    shape = SELF_ATTENTION[name]
    arrays, lengths = case(shape)
    actual = gated(*arrays, window=shape.window, lengths=lengths, impl=impl)
    for ours, wanted in zip(actual, oracle(*arrays, lengths, shape.window)):
        assert ours.dtype == jnp.float32
        assert_close(ours, wanted, shape.T)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 2**31), st.lists(st.integers(0, 600), min_size=2, max_size=2), st.sampled_from([1, 290])
)
def test_any_lengths(seed, lengths, window):
    shape = GATED_BLOCKS._replace(T=600, N=2, K=1, window=window)
    arrays, _ = case(shape, seed, ragged=False)
    actual = gated(*arrays, window=window, lengths=jnp.asarray(lengths), impl="xla")
    for ours, wanted in zip(actual, oracle(*arrays, lengths, window)):
        assert_close(ours, wanted, shape.T)


@pytest.mark.parametrize("softcap", [None, pytest.param(0.8, marks=pytest.mark.slow)])
def test_blocks_of_both_axes(softcap):
    arrays, lengths = case(GATED_BLOCKS)
    call = functools.partial(gated, *arrays, window=GATED_BLOCKS.window, lengths=lengths, softcap=softcap)
    actual = call(impl="xla")
    for ours, wanted in zip(actual, oracle(*arrays, lengths, GATED_BLOCKS.window, softcap)):
        assert_close(ours, wanted, GATED_BLOCKS.T)
    for first, second in zip(actual, call(impl="xla")):
        np.testing.assert_array_equal(first, second)


def dense(q, k, v, log_gate, window, softcap):
    """What anyone would write, in float32, for rows that are full."""
    group, t = q.shape[1] // k.shape[1], q.shape[2]
    k, v, log_gate = (jnp.repeat(x, group, axis=1) for x in (k, v, log_gate))
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    s = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(age < 0, -1e30, s + jnp.where(age < window, 0, log_gate[:, :, None, :]))
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1), v), jax.nn.logsumexp(s, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def both(f, arrays, up):
    """(outputs, gradients), of a scalar that weighs every output and every lse differently."""
    actual, back = jax.vjp(f, *arrays)
    return actual, back(tuple(x.astype(y.dtype) for x, y in zip(up, actual)))


def gradients(f, arrays, up):
    return both(f, arrays, up)[1]


def weights(shape, seed=5):
    rng = np.random.default_rng(seed)
    up = rng.normal(size=(shape.B, shape.N, shape.T, shape.H)), rng.normal(size=(shape.B, shape.N, shape.T))
    return tuple(jnp.asarray(x, jnp.float32) for x in up)


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        ("xla", "g4_h64"),
        ("xla", "blocked"),
        *extra([("ref", "g4_h64"), *(("xla", n) for n in SELF_ATTENTION)]),
    ],
)
def test_gradients_are_those_of_dense_attention(impl, name):
    shape = GATED_BLOCKS if name == "blocked" else SELF_ATTENTION[name]
    arrays, _ = case(shape, ragged=False)
    up = weights(shape)
    softcap = 3.0 if name in ("blocked", "g4_h64") else None
    ours = gradients(lambda *x: gated(*x, window=shape.window, softcap=softcap, impl=impl), tuple(arrays), up)
    wanted = gradients(lambda *x: dense(*x, shape.window, softcap), tuple(arrays), up)
    for actual, exact, array in zip(ours, wanted, arrays):
        assert actual.shape == array.shape
        assert_close(actual, exact, shape.T * shape.N, 4)
    closed = np.asarray(arrays[3]) == -30
    assert np.abs(np.asarray(wanted[3])).max() > 0.1 or shape.window >= shape.T - 1
    assert np.abs(np.asarray(ours[3])[closed]).max(initial=0) < 1e-6


def test_the_gate_gradient_is_a_difference_quotient():
    """Of the oracle itself: one gate moved, the outputs weighed."""
    shape = SELF_ATTENTION["g1_h32"]
    (q, k, v, gate), lengths = case(shape)
    gate = jnp.where(gate < -5, -1.0, gate)
    up = [np.asarray(x, np.float64) for x in weights(shape)]

    def loss(gate):
        out, lse = oracle(q, k, v, gate, lengths, shape.window)
        return float((out * up[0]).sum() + (np.where(np.isfinite(lse), lse, 0) * up[1]).sum())

    ours = jax.jit(
        jax.vjp(lambda g: gated(q, k, v, g, window=shape.window, lengths=lengths, impl="xla"), gate)[1]
    )(tuple(jnp.asarray(x, jnp.float32) for x in up))[0]
    for place in ((0, 0, 0), (0, 1, 7), (0, 1, 12)):
        step = np.zeros(gate.shape)
        step[place] = 1e-4
        base = np.asarray(gate, np.float64)
        slope = (loss(base + step) - loss(base - step)) / 2e-4
        np.testing.assert_allclose(ours[place], slope, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_padding_takes_no_part_in_gradients(impl):
    """NaN past a row's end, in arrays and cotangents alike, and the rows within as if it were not there."""
    shape = SELF_ATTENTION["g1_h32"]
    arrays, lengths = case(shape)
    up = weights(shape)
    past = np.arange(shape.T) >= np.asarray(lengths)[:, None, None]
    if impl == "xla":
        up = jnp.where(past[..., None], jnp.nan, up[0]), jnp.where(past, jnp.nan, up[1])
    else:
        up = jnp.where(past[..., None], 0, up[0]), jnp.where(past, 0, up[1])
    call = functools.partial(gated, window=shape.window, impl=impl)
    grads = gradients(lambda *x: call(*x, lengths=lengths), tuple(arrays), up)
    n = int(lengths[0])
    alone = gradients(call, tuple(x[:1, :, :n] for x in arrays), tuple(x[:1, :, :n] for x in up))
    for whole, part in zip(grads, alone):
        assert_close(whole[:1, :, :n], part, shape.T)
        np.testing.assert_array_equal(whole[0, :, n:], 0)
        np.testing.assert_array_equal(whole[1, :, 1:], 0)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_a_window_over_everything_is_blockwise(impl):
    shape = SELF_ATTENTION["g4_h64"]
    (q, k, v, gate), _ = case(shape, ragged=False)
    at = jnp.broadcast_to(jnp.arange(shape.T), (shape.B, shape.T))
    actual = gated(q, k, v, gate, window=shape.T, impl=impl)
    for ours, wanted in zip(actual, blockwise(q, k, v, q_pos=at, k_pos=at)):
        assert_close(ours, wanted, shape.T)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_closed_gates_and_no_window_are_the_empty_partial(impl):
    shape = SELF_ATTENTION["g8_h96"]
    (q, k, v, gate), _ = case(shape, ragged=False)
    call = functools.partial(gated, window=0, impl=impl)
    shut = jnp.full_like(gate, -jnp.inf).at[:, :, 4].set(0)
    out, lse = call(q, k, v, shut)
    np.testing.assert_array_equal(lse[:, :, :4], -np.inf)
    np.testing.assert_array_equal(out[:, :, :4], 0)
    np.testing.assert_allclose(out[:, :, 4:], jnp.broadcast_to(v[:, :, 4:5], out[:, :, 4:].shape), rtol=1e-6)
    grads = gradients(call, (q, k, v, shut), weights(shape))
    assert all(np.isfinite(g).all() for g in grads)
    np.testing.assert_array_equal(np.asarray(grads[3])[:, :, np.arange(shape.T) != 4], 0)


@pytest.mark.parametrize("impl", ["xla", pytest.param("ref", marks=pytest.mark.slow)])
def test_bfloat16_is_as_good_as_the_plain_way(impl):
    shape = SELF_ATTENTION["g1_h128"]._replace(window=20)
    arrays, _ = case(shape, dtype=jnp.bfloat16, ragged=False)
    arrays[3] = arrays[3].astype(jnp.bfloat16)
    plainly = functools.partial(dense, window=shape.window, softcap=None)
    up, wide = weights(shape), tuple(x.astype(jnp.float32) for x in arrays)
    ours = both(functools.partial(gated, window=shape.window, impl=impl), tuple(arrays), up)
    theirs, (_, truth) = both(plainly, tuple(arrays), up), both(plainly, wide, up)
    for actual, other, exact in zip(ours[0], theirs[0], oracle(*arrays, None, shape.window)):
        assert_as_good_as_plain(actual, other, exact, shape.T)
    for actual, other, exact in zip(ours[1], theirs[1], truth):
        assert actual.dtype == jnp.bfloat16
        assert_as_good_as_plain(actual, other, exact, shape.T)


@pytest.mark.slow
def test_memory_follows_the_prompt_not_its_square():
    t = 8192
    arrays = [jax.ShapeDtypeStruct((1, n, t, 32), jnp.bfloat16) for n in (2, 1, 1)]
    gate = jax.ShapeDtypeStruct((1, 1, t), jnp.float32)

    def loss(*x):
        return gated(*x, window=256, impl="xla")[0].sum()

    program = compiled_in_full(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*arrays, gate))
    assert program.memory_analysis().temp_size_in_bytes < t * t / 4


def test_refusals():
    (q, k, v, gate), lengths = case(SELF_ATTENTION["g1_h32"])
    check_refusals(gated, q, k, v, gate, lengths, each="one log gate a key")
