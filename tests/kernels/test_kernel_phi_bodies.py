"""phi's Pallas bodies and their gradients, interpreted, and every number of tokens in all implementations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_bodies import BODIES, body, check_no_race
from kernel_numerics import assert_close
from kernel_sizes import PHI
from test_kernel_phi import case, gradients, oracle, summary_oracle

from pallas_kernels.dispatch import interpreted
from pallas_kernels.phi import ref, xla
from pallas_kernels.phi.api import FLOOR, phi_build, phi_evaluate, phi_subtract


def bodies(impl):
    """build, subtract and evaluate of a Pallas body, with tiles so small that few tokens fill several."""
    small = {"blocks": (0, 128) if impl == "mosaic_tpu" else (0, 32, 64)}
    run = functools.partial(body, "phi", impl)
    return run("build", **small), run("subtract", **small), run("evaluate")


@pytest.mark.parametrize("impl", BODIES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("g1_h32", jnp.float32),
        *(pytest.param(n, d, marks=pytest.mark.slow) for n in PHI for d in (jnp.float32, jnp.bfloat16)),
    ],
)
def test_bodies(impl, name, dtype):
    """Several tiles of tokens, a feature that is 0, a KV head with nothing; against ``ref``."""
    shape = PHI[name]
    shape = shape._replace(S=140 if impl == "mosaic_tpu" else 100)
    (log_q, log_k, v), there, read = case(shape, dtype=dtype)
    log_q, log_k = log_q.at[..., 0].set(-jnp.inf), log_k.at[..., 1].set(-jnp.inf)
    there, read = there.at[0, 0].set(False), read.at[0, 0].set(False)
    half = there & (jnp.arange(shape.S) < shape.S // 2)
    first = ref.build(log_k, v, half, None)

    def all_of_it(build, subtract, evaluate):
        whole = build(log_k, v, there & ~half, first)
        return whole, subtract(whole, log_k, v, read, floor=FLOOR), evaluate(whole, log_q)

    wanted = all_of_it(ref.build, ref.subtract, ref.evaluate)
    for ours, exact in zip(jax.tree.leaves(all_of_it(*bodies(impl))), jax.tree.leaves(wanted)):
        assert ours.dtype == exact.dtype
        assert_close(ours, exact, shape.S, 4)
    check_no_race(impl)


@pytest.mark.parametrize("impl", ["xla", *BODIES])
def test_every_number_of_tokens(impl):
    """Rows of 0, 1, tile - 1, tile, tile + 1 and all tokens, built and evaluated; the rest is NaN."""
    tile = {"xla": xla.BLOCK, "mosaic_tpu": 128, "triton": 32}[impl]
    shape = PHI["g1_h32"]._replace(B=6, N=2, K=1, T=2, S=2 * tile + 2)
    (log_q, log_k, v), _, _ = case(shape, live=1.0)
    there = jnp.arange(shape.S) < jnp.asarray([0, 1, tile - 1, tile, tile + 1, shape.S])[:, None, None]
    log_k, v = (jnp.where(there[..., None], x, jnp.nan) for x in (log_k, v))
    build, _, evaluate = (xla.build, None, xla.evaluate) if impl == "xla" else bodies(impl)
    whole = build(log_k, v, there, None)
    for ours, wanted in zip(whole, summary_oracle(log_k, v, there)):
        assert_close(ours, wanted, shape.S)
    for ours, wanted in zip(evaluate(whole, log_q), oracle(log_q, log_k, v, there)):
        assert_close(ours, wanted, shape.S)
    for first, second in zip(whole, build(log_k, v, there, None)):
        np.testing.assert_array_equal(first, second)
    check_no_race(impl)


@pytest.mark.parametrize("impl", ["triton", pytest.param("mosaic_tpu", marks=pytest.mark.slow)])
def test_bodies_have_the_gradient_of_xla(impl):
    """Of building onto a summary, subtracting and evaluating, in every float array."""
    shape = PHI["g1_h32"]
    (log_q, log_k, v), there, read = case(shape, live=0.8)
    log_k, v = jnp.nan_to_num(log_k) / 3, jnp.nan_to_num(v)
    half = there & (jnp.arange(shape.S) < shape.S // 2)

    def all_of_it(impl, log_q, log_k, v):
        whole = phi_build(log_k, v, there=half, impl=impl)
        whole = phi_build(log_k, v, there=there & ~half, onto=whole, impl=impl)
        return phi_evaluate(phi_subtract(whole, log_k, v, there=read, impl=impl), log_q, impl=impl)

    with interpreted():
        ours, wanted = (
            gradients(functools.partial(all_of_it, which), log_q, log_k, v) for which in (impl, "xla")
        )
    for actual, exact in zip(ours, wanted):
        assert_close(actual, exact, shape.S * shape.N)
        assert float(jnp.abs(exact).max()) > 1e-3
