"""blockwise and column_mass against NumPy, at the edges of blocks, windows and padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_oracle import blockwise as oracle
from kernel_sizes import BLOCKWISE, BLOCKWISE_BLOCKS

from pallas_kernels import Unsupported, blockwise, column_mass, merge

IMPLS = ("ref", "xla")
SIGHTS = {"causal": (None, 0.0), "window": (7, 0.0), "admitted": (7, 0.2)}


def case(shape, seed=0, dtype=jnp.float32, admitted=0.0, padding=3):
    """A ring in arbitrary order, `padding` keys and one query missing; NaN where padded."""
    rng = np.random.default_rng(seed)
    b, n, kv, t, s, h = shape
    q = rng.normal(size=(b, n, t, h))
    k, v = rng.normal(size=(2, b, kv, s, h))
    k_pos = np.stack([rng.permutation(s) for _ in range(b)]) - padding
    q_pos = np.stack([np.arange(t) + s - padding - (t + 1) // 2 for _ in range(b)])
    if t > 1:
        q_pos[0, 0] = -1
    k, v = (np.where((k_pos < 0)[:, None, :, None], np.nan, x) for x in (k, v))
    admit = jnp.asarray(rng.random((b, kv, s)) < admitted) if admitted else None
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return arrays, {
        "q_pos": jnp.asarray(q_pos, jnp.int32),
        "k_pos": jnp.asarray(k_pos, jnp.int32),
        "admit": admit,
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", BLOCKWISE)
def test_small_shapes(impl, name):
    arrays, where = case(BLOCKWISE[name], admitted=0.3)
    out, lse = blockwise(*arrays, **where, window=5, impl=impl)
    want_out, want_lse, p = oracle(*arrays, **where, window=5)
    assert out.dtype == lse.dtype == jnp.float32
    assert_close(out, want_out, BLOCKWISE[name].S)
    assert_close(lse, want_lse, BLOCKWISE[name].S)
    weights = jnp.broadcast_to(jnp.linspace(-1, 2, BLOCKWISE[name].T), where["q_pos"].shape)
    mass = column_mass(arrays[0], arrays[1], lse, weights, **where, window=5, impl=impl)
    assert_close(mass, np.einsum("bnts,bt->bns", p, np.asarray(weights)), BLOCKWISE[name].T)


@pytest.mark.parametrize("sight", SIGHTS)
def test_blocks_of_both_axes(sight):
    window, admitted = SIGHTS[sight]
    arrays, where = case(BLOCKWISE_BLOCKS, admitted=admitted)
    out, lse = blockwise(*arrays, **where, window=window, impl="xla")
    want_out, want_lse, p = oracle(*arrays, **where, window=window)
    assert_close(out, want_out, BLOCKWISE_BLOCKS.S)
    assert_close(lse, want_lse, BLOCKWISE_BLOCKS.S)
    weights = np.random.default_rng(1).random((BLOCKWISE_BLOCKS.B, BLOCKWISE_BLOCKS.T)).astype(np.float32)
    mass = column_mass(arrays[0], arrays[1], lse, jnp.asarray(weights), **where, window=window, impl="xla")
    assert_close(mass, np.einsum("bnts,bt->bns", p, weights), BLOCKWISE_BLOCKS.T)
    if sight == "causal":
        again = blockwise(*arrays, **where, window=window, impl="xla")
        np.testing.assert_array_equal(out, again[0])
        np.testing.assert_array_equal(lse, again[1])


@pytest.mark.parametrize(("impl", "name"), [("ref", "small"), ("xla", "small"), ("xla", "blocked")])
def test_capped_scores(impl, name):
    """A cap that bends most scores, in every form of the operation and of its column mass."""
    shape = BLOCKWISE_BLOCKS if name == "blocked" else BLOCKWISE["g4_h64"]
    arrays, where = case(shape, admitted=0.2)
    options = {**where, "window": 7, "softcap": 0.8}
    out, lse = blockwise(*arrays, **options, impl=impl)
    want_out, want_lse, p = oracle(*arrays, **options)
    assert_close(out, want_out, shape.S)
    assert_close(lse, want_lse, shape.S)
    weights = jnp.ones((shape.B, shape.T))
    mass = column_mass(arrays[0], arrays[1], lse, weights, **options, impl=impl)
    assert_close(mass, p.sum(axis=2), shape.T)
    plain = oracle(*arrays, **where, window=7)[0]
    assert np.abs(want_out - plain).max() > 0.1


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 600), st.sampled_from([1, 40, 600]))
def test_skipped_blocks_are_those_nobody_sees(seed, span, spread):
    """Any positions at all: runs, holes, repeats, whole blocks of padding."""
    rng = np.random.default_rng(seed)
    arrays, where = case(BLOCKWISE_BLOCKS, seed, padding=0)
    q_pos = rng.integers(-1, span, size=(BLOCKWISE_BLOCKS.B, BLOCKWISE_BLOCKS.T)) // spread * spread
    k_pos = np.sort(rng.integers(-span, span, size=(BLOCKWISE_BLOCKS.B, BLOCKWISE_BLOCKS.S)), axis=1)
    where |= {"q_pos": jnp.asarray(q_pos, jnp.int32), "k_pos": jnp.asarray(k_pos, jnp.int32)}
    where["admit"] = jnp.asarray(
        rng.random((BLOCKWISE_BLOCKS.B, BLOCKWISE_BLOCKS.K, BLOCKWISE_BLOCKS.S)) < rng.choice([0.0, 0.01])
    )
    out, lse = blockwise(*arrays, **where, window=7, impl="xla")
    want_out, want_lse, p = oracle(*arrays, **where, window=7)
    assert_close(out, want_out, BLOCKWISE_BLOCKS.S)
    assert_close(lse, want_lse, BLOCKWISE_BLOCKS.S)
    weights = np.zeros((BLOCKWISE_BLOCKS.B, BLOCKWISE_BLOCKS.T), np.float32)
    weights[:, -32:] = 1
    mass = column_mass(arrays[0], arrays[1], lse, jnp.asarray(weights), **where, window=7, impl="xla")
    assert_close(mass, np.einsum("bnts,bt->bns", p, weights), BLOCKWISE_BLOCKS.T)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["g1_h128", "g4_h64"])
def test_bfloat16_is_as_good_as_the_plain_way(impl, name):
    arrays, where = case(BLOCKWISE[name], dtype=jnp.bfloat16, padding=0)
    exact_out, exact_lse, _ = oracle(*arrays, **where)
    plain_out, plain_lse = plain(*arrays, where["q_pos"], where["k_pos"])
    out, lse = blockwise(*arrays, **where, impl=impl)
    there = np.isfinite(exact_lse)
    assert_as_good_as_plain(out[there], plain_out[there], exact_out[there], BLOCKWISE[name].S)
    assert_as_good_as_plain(lse, plain_lse, exact_lse, BLOCKWISE[name].S)


@jax.jit
def plain(q, k, v, q_pos, k_pos):
    """What anyone would write: einsum, mask, softmax, everything in the arrays' own dtype."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    i, j = q_pos[:, None, :, None], k_pos[:, None, None, :]
    s = jnp.einsum("bnth,bnsh->bnts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    s = jnp.where((j <= i) & (i >= 0), s, -1e30)
    out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1).astype(jnp.bfloat16), v)
    return out, jax.nn.logsumexp(s, axis=-1)


@pytest.mark.parametrize("impl", IMPLS)
def test_halves_merge_to_the_whole(impl):
    shape = BLOCKWISE["g4_h64"]
    (q, k, v), where = case(shape)
    cut = 29
    halves = [
        blockwise(
            q, k[:, :, a:b], v[:, :, a:b], q_pos=where["q_pos"], k_pos=where["k_pos"][:, a:b], impl=impl
        )
        for a, b in ((0, cut), (cut, shape.S))
    ]
    whole = blockwise(q, k, v, **where, impl=impl)
    merged = merge(halves)
    assert_close(merged[0], whole[0], shape.S)
    assert_close(merged[1], whole[1], shape.S)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_see_is_the_empty_partial(impl):
    (q, k, v), where = case(BLOCKWISE["g1_h32"])
    where["k_pos"] = jnp.full_like(where["k_pos"], -1)
    k, v = jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.inf)
    out, lse = blockwise(q, k, v, **where, impl=impl)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    mass = column_mass(q, k, lse, jnp.ones_like(where["q_pos"], jnp.float32), **where, impl=impl)
    np.testing.assert_array_equal(mass, 0)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_are_those_of_dense_attention(impl):
    shape = BLOCKWISE["g4_h64"]
    (q, k, v), where = case(shape, padding=0)
    where["q_pos"] = jnp.maximum(where["q_pos"], 0)

    @jax.jit
    def dense(q, k, v):
        k, v = (jnp.repeat(x, shape.N // shape.K, axis=1) for x in (k, v))
        age = where["q_pos"][:, None, :, None] - where["k_pos"][:, None, None, :]
        s = jnp.einsum("bnth,bnsh->bnts", q, k) * shape.H**-0.5
        s = jnp.where((age >= 0) & (age < 40), s, -1e30)
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s, axis=-1), v), jax.nn.logsumexp(s, axis=-1)

    actual, back = jax.vjp(lambda *x: blockwise(*x, **where, window=40, impl=impl), q, k, v)
    wanted, back_dense = jax.vjp(dense, q, k, v)
    seen = jnp.isfinite(actual[1])
    up = jnp.where(seen[..., None], jnp.cos(actual[0]), 0), jnp.where(seen, jnp.sin(actual[1]), 0)
    for ours, theirs in zip(back(up), back_dense(up)):
        assert_close(ours, theirs, shape.S * shape.N)
    assert float(jnp.abs(back(up)[1]).max()) > 0.01


@pytest.mark.parametrize("sight", SIGHTS)
def test_gradients_of_the_blocked_form(sight):
    """Through out and lse, with padding, queries that see nothing and a cap; the definition is dense."""
    window, admitted = SIGHTS[sight]
    arrays, where = case(BLOCKWISE_BLOCKS, admitted=admitted)
    options = {**where, "window": window, "softcap": 2.0 if sight == "admitted" else None}
    actual, back = jax.vjp(lambda *x: blockwise(*x, **options, impl="xla"), *arrays)
    _, back_dense = jax.vjp(lambda *x: blockwise(*x, **options, impl="ref"), *arrays)
    seen = jnp.isfinite(actual[1])
    assert not bool(seen.all())
    up = jnp.cos(actual[0]), jnp.where(seen, jnp.sin(actual[1]), 0)
    for ours, theirs in zip(back(up), back_dense(up)):
        assert_close(ours, theirs, BLOCKWISE_BLOCKS.S * BLOCKWISE_BLOCKS.N)
    assert float(jnp.abs(back(up)[1]).max()) > 0.01


def test_padding_gives_no_nan_gradient():
    (q, k, v), where = case(BLOCKWISE["g4_h64"], padding=3)
    grads = jax.grad(lambda *x: blockwise(*x, **where, impl="ref")[0].sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in grads)


def test_refusals():
    (q, k, v), where = case(BLOCKWISE["g1_h32"])
    for impl in ("mosaic_tpu", "triton"):
        with pytest.raises(Unsupported, match="its body is for"):
            blockwise(q, k, v, **where, impl=impl)
        with pytest.raises(Unsupported, match="its body is for"):
            column_mass(q, k, q[..., 0], where["q_pos"], **where, impl=impl)
    with pytest.raises(ValueError, match="do not divide"):
        blockwise(jnp.concatenate([q, q[:, :1]], axis=1), k, v, **where)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        blockwise(q, k, v, q_pos=where["k_pos"], k_pos=where["k_pos"])
    with pytest.raises(ValueError, match="one shape"):
        blockwise(q, k, v[:, :, 1:], **where)
    with pytest.raises(ValueError, match="counts positions"):
        blockwise(q, k, v, **where, window=-1)
    with pytest.raises(ValueError, match="softcap=0"):
        blockwise(q, k, v, **where, softcap=0)
