"""The Pallas bodies of blockwise and column_mass, interpreted: against NumPy, and gradients against ``ref``.

A few representative cases run by default, the whole grid with ``-m slow``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import races_found
from kernel_numerics import assert_as_good_as_plain, assert_close, error
from kernel_oracle import blockwise as oracle
from kernel_sizes import BLOCKWISE, BLOCKWISE_BLOCKS
from test_kernel_blockwise import case, plain

from pallas_kernels import Unsupported, blockwise, column_mass, merge
from pallas_kernels.blockwise import mosaic_tpu, mosaic_tpu_grad
from pallas_kernels.blockwise.work import BlockwiseSizes
from pallas_kernels.dispatch import interpreted

BODIES = ("mosaic_tpu", "triton")
SMALL = BlockwiseSizes(B=2, N=4, K=2, T=70, S=200, H=32)
"""Several blocks of both sides, whose edges fall inside heads and rows."""

SHAPES = BLOCKWISE | {"blocks": SMALL, "one_row": SMALL._replace(B=1, N=2, K=1)}
GRID = [(name, admitted) for name in SHAPES for admitted in (None, 0.0, 0.05)]


def grid(quick):
    """All cases, one of them not slow."""
    return [pytest.param(*x, marks=() if x == (quick, 0.05) else pytest.mark.slow) for x in GRID]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    """Bodies run interpreted, TPU blocks of one tile of lanes; and no TPU body may have raced."""
    monkeypatch.setattr(mosaic_tpu, "BLOCK", 128)
    jitted = (mosaic_tpu.blockwise, mosaic_tpu.column_mass, mosaic_tpu_grad.backward)
    for f in jitted:
        f.clear_cache()
    with interpreted():
        yield
    if "mosaic_tpu" in request.node.name:
        assert not races_found()
    for f in jitted:
        f.clear_cache()


def sighted(shape, admitted, seed=0):
    """A call and its options: no window, a window, or a window and admitted keys beyond it."""
    arrays, where = case(shape, seed, admitted=admitted or 0.0)
    return arrays, {**where, "window": None if admitted is None else 7, "softcap": 2.0}


@pytest.mark.parametrize("impl", ["ref", "xla", *BODIES])
def test_positions_up_to_a_million_count_like_small_ones(impl):
    """Only differences of positions count: a million tokens into a text a read gives the same bits."""
    arrays, options = sighted(BlockwiseSizes(B=1, N=2, K=1, T=6, S=40, H=32), 0.05)
    last = max(int(options["q_pos"].max()), int(options["k_pos"].max()))
    later = {
        name: jnp.where(options[name] < 0, options[name], options[name] + 2**20 - 1 - last)
        for name in ("q_pos", "k_pos")
    }
    near, far = (blockwise(*arrays, **options | moved, impl=impl) for moved in ({}, later))
    assert max(int(x.max()) for x in later.values()) == 2**20 - 1
    for one, other in zip(near, far):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("impl", "shape"), [(impl, SMALL) for impl in ("ref", "xla", *BODIES)] + [("xla", BLOCKWISE_BLOCKS)]
)
def test_out_in_the_models_dtype(impl, shape):
    """Rounded once, at the end; gradients come through it."""
    arrays, options = sighted(shape, 0.05)
    exact = functools.partial(blockwise, **options, impl=impl)
    rounded = functools.partial(exact, dtype=jnp.bfloat16)
    (out, lse), (half, same) = exact(*arrays), rounded(*arrays)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(same, lse)
    if impl != "triton":  # whose backward pass its own test has
        back, back_half = (jax.vjp(lambda *x, f=f: f(*x)[0], *arrays)[1] for f in (exact, rounded))
        up = jnp.cos(jnp.nan_to_num(half))
        for ours, theirs in zip(back_half(up), back(up.astype(jnp.float32))):
            assert error(ours, theirs) < 2.0**-8 * error(jnp.zeros_like(theirs), theirs)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(("name", "admitted"), grid("blocks"))
def test_out_lse_and_mass(impl, name, admitted):
    shape = SHAPES[name]
    arrays, options = sighted(shape, admitted)
    out, lse = blockwise(*arrays, **options, impl=impl)
    want_out, want_lse, p = oracle(*arrays, **options)
    assert_close(out, want_out, shape.S)
    assert_close(lse, want_lse, shape.S)
    weights = np.random.default_rng(1).normal(size=(shape.B, shape.T)).astype(np.float32)
    weights[:, : shape.T // 2] = 0
    mass = column_mass(arrays[0], arrays[1], lse, jnp.asarray(weights), **options, impl=impl)
    assert_close(mass, np.einsum("bnts,bt->bns", p, weights), shape.T)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(("name", "admitted"), grid("one_row"))
def test_gradients_are_those_of_the_definition(impl, name, admitted):
    shape = SHAPES[name]
    arrays, options = sighted(shape, admitted)
    actual, back = jax.vjp(lambda *x: blockwise(*x, **options, impl=impl), *arrays)
    _, back_dense = jax.vjp(lambda *x: blockwise(*x, **options, impl="ref"), *arrays)
    seen = jnp.isfinite(actual[1])
    up = jnp.cos(actual[0]), jnp.where(seen, jnp.sin(actual[1]), 0)
    grads = back(up)
    for ours, theirs in zip(grads, back_dense(up)):
        assert_close(ours, theirs, shape.S * shape.N)
    assert float(jnp.abs(grads[1]).max()) > 0.01


@pytest.mark.parametrize("impl", ["xla", *BODIES])
def test_every_length_of_a_row(impl):
    """Rows of 0, 1, block - 1, block, block + 1 and two blocks and more of keys; NaN past their ends."""
    block = 128 if impl == "mosaic_tpu" else 32
    ends = np.array([0, 1, block - 1, block, block + 1, 2 * block + 3])
    shape = BlockwiseSizes(B=6, N=2, K=1, T=4, S=2 * block + 5, H=32)
    (q, k, v), _ = case(shape, padding=0)
    at = np.broadcast_to(np.arange(shape.S), (6, shape.S))
    k_pos = np.where(at < ends[:, None], at, -1)
    k, v = (jnp.where((k_pos < 0)[:, None, :, None], jnp.nan, x) for x in (k, v))
    q_pos = np.maximum(ends[:, None] - 1 - np.array([0, 1, 2, block]), -1)
    where = {"q_pos": jnp.asarray(q_pos, jnp.int32), "k_pos": jnp.asarray(k_pos, jnp.int32)}
    out, lse = blockwise(q, k, v, **where, impl=impl)
    want_out, want_lse, p = oracle(q, k, v, **where)
    assert_close(out, want_out, shape.S)
    assert_close(lse, want_lse, shape.S)
    mass = column_mass(q, k, lse, jnp.ones(q_pos.shape), **where, impl=impl)
    assert_close(mass, p.sum(axis=2), shape.T)
    for actual, again in zip((out, lse), blockwise(q, k, v, **where, impl=impl)):
        np.testing.assert_array_equal(actual, again)


def apart(impl):
    """Queries that see nothing near; each KV head admits keys of one block of its own."""
    block, t = {"mosaic_tpu": (128, 2), "triton": (32, 2), "xla": (512, 100)}[impl]
    shape = BlockwiseSizes(B=1, N=4, K=2, T=t, S=3 * block, H=32)
    arrays, where = case(shape, padding=0)
    at = jnp.arange(shape.S)
    admit = jnp.stack([at // block == head for head in (0, 2)])[None] & (at % 5 == 0)
    where |= {"k_pos": at[None], "q_pos": shape.S + 90 + jnp.arange(t)[None], "admit": admit}
    return shape, arrays, {**where, "window": 7}


@pytest.mark.parametrize("impl", ["xla", *BODIES])
def test_every_head_walks_blocks_of_its_own(impl):
    shape, arrays, options = apart(impl)
    out, lse = blockwise(*arrays, **options, impl=impl)
    want_out, want_lse, p = oracle(*arrays, **options)
    assert_close(out, want_out, shape.S)
    assert_close(lse, want_lse, shape.S)
    mass = column_mass(*arrays[:2], lse, jnp.ones((1, shape.T)), **options, impl=impl)
    assert_close(mass, p.sum(axis=2), shape.T)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_gradients_of_every_head_walk_blocks_of_its_own(impl):
    shape, arrays, options = apart(impl)
    actual, back = jax.vjp(lambda *x: blockwise(*x, **options, impl=impl), *arrays)
    _, back_dense = jax.vjp(lambda *x: blockwise(*x, **options, impl="ref"), *arrays)
    for ours, theirs in zip(back(actual), back_dense(actual)):
        assert_close(ours, theirs, shape.S * shape.N)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_halves_merge_to_the_whole(impl):
    (q, k, v), where = case(SMALL)
    options = {"q_pos": where["q_pos"], "window": 50, "impl": impl}
    parts = [
        blockwise(q, k[:, :, part], v[:, :, part], k_pos=where["k_pos"][:, part], **options)
        for part in (slice(0, 77), slice(77, None))
    ]
    for ours, whole in zip(merge(parts), blockwise(q, k, v, k_pos=where["k_pos"], **options)):
        assert_close(ours, whole, SMALL.S)


@pytest.mark.parametrize("impl", ["xla", "triton"])
def test_the_gradient_of_mass_is_that_of_the_definition(impl):
    """In q, k, lse and weights."""
    shape = SHAPES["one_row"]
    (q, k, _), options = sighted(shape, 0.05)
    k = jnp.nan_to_num(k)
    weights = jnp.asarray(np.random.default_rng(3).random((shape.B, shape.T)), jnp.float32)
    lse = jnp.full(q.shape[:3], 3.0)

    def total(impl, *x):
        return jnp.sum(jnp.sin(column_mass(*x, **options, impl=impl)))

    ours, wanted = (
        jax.grad(functools.partial(total, which), argnums=(0, 1, 2, 3))(q, k, lse, weights)
        for which in (impl, "ref")
    )
    for actual, exact in zip(ours, wanted):
        assert_close(actual, exact, shape.S * shape.N)
        assert float(jnp.abs(exact).max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("name", BLOCKWISE)
def test_bfloat16_is_as_good_as_the_plain_way(impl, name):
    arrays, where = case(BLOCKWISE[name], dtype=jnp.bfloat16, padding=0)
    exact_out, exact_lse, _ = oracle(*arrays, **where)
    plain_out, plain_lse = plain(*arrays, where["q_pos"], where["k_pos"])
    out, lse = blockwise(*arrays, **where, impl=impl)
    there = np.isfinite(exact_lse)
    assert_as_good_as_plain(out[there], plain_out[there], exact_out[there], BLOCKWISE[name].S)
    assert_as_good_as_plain(lse, plain_lse, exact_lse, BLOCKWISE[name].S)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@pytest.mark.parametrize("impl", BODIES)
@given(st.integers(0, 2**31), st.integers(1, 300), st.sampled_from([1, 40, 300]))
def test_blocks_left_out_are_those_nobody_sees(impl, seed, span, spread):
    """Any positions at all: runs, holes, repeats, whole blocks of padding."""
    rng = np.random.default_rng(seed)
    arrays, options = sighted(SMALL, 0.01, seed)
    q_pos = rng.integers(-1, span, size=(SMALL.B, SMALL.T)) // spread * spread
    k_pos = np.sort(rng.integers(-span, span, size=(SMALL.B, SMALL.S)), axis=1)
    options |= {"q_pos": jnp.asarray(q_pos, jnp.int32), "k_pos": jnp.asarray(k_pos, jnp.int32)}
    arrays[1:] = [jnp.nan_to_num(x) for x in arrays[1:]]
    out, lse = blockwise(*arrays, **options, impl=impl)
    want_out, want_lse, _ = oracle(*arrays, **options)
    assert_close(out, want_out, SMALL.S)
    assert_close(lse, want_lse, SMALL.S)


@pytest.mark.slow
def test_lists_that_do_not_fit_smem_are_refused():
    b, s = 16, 1 << 14
    shapes = [jax.ShapeDtypeStruct((b, heads, s, 32), jnp.float32) for heads in (2, 2, 2)]
    pos = jax.ShapeDtypeStruct((b, s), jnp.int32)
    with pytest.raises(Unsupported, match="SMEM"):
        jax.eval_shape(
            lambda q, k, v, i: blockwise(q, k, v, q_pos=i, k_pos=i, impl="mosaic_tpu"), *shapes, pos
        )
