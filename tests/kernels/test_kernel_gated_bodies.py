"""gated's Pallas bodies and their gradients, interpreted, and rows of every length in all implementations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_bodies import BODIES, body, check_no_race, small_blocks
from kernel_numerics import assert_as_good_as_plain, assert_close
from kernel_sizes import SELF_ATTENTION
from test_kernel_gated import both, case, dense, gradients, oracle, weights

from pallas_kernels.gated import ref, xla
from pallas_kernels.gated.vjp import Rule


@pytest.mark.parametrize("impl", ["xla", *BODIES])
def test_every_length_of_a_row(impl):
    """0, 1, block - 1, block, block + 1 and all; NaN past the ends; the same to the bit when asked again."""
    block = 512 if impl == "xla" else small_blocks(impl)[1]
    t, run = block + 3, xla.gated if impl == "xla" else body("gated", impl, "gated")
    shape = SELF_ATTENTION["g1_h32"]._replace(B=6, N=2, K=1, T=t, window=block // 3)
    arrays, _ = case(shape, ragged=False)
    lengths = jnp.asarray([0, 1, block - 1, block, block + 1, t], jnp.int32)
    past = (jnp.arange(t) >= lengths[:, None])[:, None]
    arrays = [jnp.where(past[..., None] if x.ndim == 4 else past, jnp.nan, x) for x in arrays]
    rule = Rule(shape.window, 0.2, None, () if impl == "xla" else small_blocks(impl))
    actual = run(*arrays, lengths, rule=rule)
    for ours, wanted in zip(actual, oracle(*arrays, lengths, shape.window, scale=0.2)):
        assert_close(ours, wanted, t)
    for first, second in zip(actual, run(*arrays, lengths, rule=rule)):
        np.testing.assert_array_equal(first, second)
    check_no_race(impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_blocks_change_nothing(impl):
    """Split another way, the sums are the same up to rounding."""
    shape = SELF_ATTENTION["g1_h32"]._replace(T=300, window=70)
    arrays, _ = case(shape, ragged=False)
    run = body("gated", impl, "gated")
    sizes = ((128, 128), (128, 384), (256, 128)) if impl == "mosaic_tpu" else ((16, 32), (64, 16), (32, 32))
    results = [run(*arrays, None, rule=Rule(shape.window, 0.2, None, size)) for size in sizes]
    for other in results[1:]:
        for ours, wanted in zip(other, results[0]):
            assert_close(ours, wanted, shape.T)


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("softcap", [None, pytest.param(0.8, marks=pytest.mark.slow)])
def test_bodies_and_their_gradients(impl, softcap):
    """Two tiles and a bit of each axis, rows of differing length, NaN past their ends; against ``ref``."""
    t = 140 if impl == "mosaic_tpu" else 40
    shape = SELF_ATTENTION["g1_h32"]._replace(N=2, K=1, T=t, window=t // 3)
    arrays, _ = case(shape)
    lengths = jnp.asarray([t - 2, 3 * t // 5], jnp.int32)
    arrays = [jnp.nan_to_num(x) for x in arrays]
    past = jnp.arange(t) >= lengths[:, None, None]
    poisoned = [jnp.where(past.reshape(*past.shape, *[1] * (x.ndim - 3)), jnp.nan, x) for x in arrays]
    rule = Rule(shape.window, 0.2, softcap, small_blocks(impl))
    up = weights(shape)

    up = jnp.where(past[..., None], 0, up[0]), jnp.where(past, 0, up[1])

    def results(f):
        actual = both(lambda *x: f(*x, lengths, rule=rule), tuple(poisoned), up)
        return jax.tree.leaves(actual)

    for ours, wanted in zip(results(body("gated", impl, "gated")), results(ref.gated)):
        assert ours.dtype == wanted.dtype
        assert_close(ours, wanted, shape.T * shape.N, 4)
    check_no_race(impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
def test_bfloat16_gradients_of_bodies_are_as_good_as_the_plain_way(impl):
    shape = SELF_ATTENTION["g1_h128"]._replace(N=4, window=20)
    arrays, _ = case(shape, dtype=jnp.bfloat16, ragged=False)
    arrays[3] = arrays[3].astype(jnp.bfloat16)
    plainly = functools.partial(dense, window=shape.window, softcap=None)
    run, rule = body("gated", impl, "gated"), Rule(shape.window, shape.H**-0.5, None, small_blocks(impl))
    up, wide = weights(shape), tuple(x.astype(jnp.float32) for x in arrays)
    ours = gradients(lambda *x: run(*x, None, rule=rule), tuple(arrays), up)
    theirs, truth = gradients(plainly, tuple(arrays), up), gradients(plainly, wide, up)
    for actual, other, exact in zip(ours, theirs, truth):
        assert actual.dtype == jnp.bfloat16
        assert_as_good_as_plain(actual, other, exact, shape.T)


@pytest.mark.slow
@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_bodies_on_all_small_shapes(impl, name, dtype):
    shape = SELF_ATTENTION[name]
    arrays, lengths = case(shape, dtype=dtype)
    rule = Rule(shape.window, shape.H**-0.5, None, small_blocks(impl))
    actual, plain = (f(*arrays, lengths, rule=rule) for f in (body("gated", impl, "gated"), xla.gated))
    for ours, plainly, exact in zip(actual, plain, oracle(*arrays, lengths, shape.window)):
        assert_as_good_as_plain(ours, plainly, exact, shape.T)
