"""A layer's decode step for chips that are not here: rings and pools are written where they are.

``test_in_place`` asks XLA on CPU the same. See ``test_aot_ops`` for how to run it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from chips import chip_or_skip
from jax.sharding import SingleDeviceSharding

import kvjax
from benchmarks.kernels.programs import copies, launches
from kvjax import layer
from kvjax.algebra import Native
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.types import Heads
from pallas_kernels import dispatch, lowering

pytestmark = pytest.mark.aot

N, K, H, W, S, M = 32, 8, 128, 256, 64, 128
POOL = K * M * S * H
SPECS = ("sinks(4) + window(256)", pytest.param("knorm + uniform(4096, every_step)", marks=pytest.mark.slow))
CHIPS = ("h200", pytest.param("v5e", marks=pytest.mark.slow))
LAUNCHES = {"h200": 16, "v5e": 63}
"""Of a step in one kernel, which on a GPU is two, and of all that finds its pages (27 and 107 in today's)."""


def made(policy: kvjax.Policy) -> LayerCache:
    """A layer's cache of one row."""
    kept = {"meta": policy.keeps, "arrays": policy.arrays}
    ring = rings.empty(1, K, W, H, jnp.dtype(jnp.bfloat16), **kept)
    pages = pool.empty(
        pages=K * M,
        size=S,
        rows=1,
        heads=K,
        lists=1,
        entries=M,
        **Native().layout(S, H, jnp.dtype(jnp.bfloat16)),
        summary={},
        **kept,
    )
    return LayerCache(ring=ring, pages=pages, summary=None)


def compiled(chip: str, spec: str, steps: int = 1):
    """A step whose cache is donated, or a loop over some."""
    policy = kvjax.policy(spec)
    place = chip_or_skip(chip)

    def step(cache, q, k, v, length):
        x = Heads(q=q, k=k, v=v, q_pre=q, k_pre=k, hidden=q[:, :, 0])
        info = layer.LayerInfo(policy, {}, 0, 1, None, length)
        _, (cache, read) = layer.step(info, x, cache, length, length >= 0)
        return read, cache

    def run(cache, q, k, v, length):
        def one(i, carry):
            read, cache = step(carry[0], carry[1], k, v, length + i)
            return cache, read.out

        return jax.lax.fori_loop(0, steps, one, (cache, q))

    heads = [jax.ShapeDtypeStruct((1, 1, n, H), jnp.bfloat16) for n in (N, K, K)]
    args = (jax.eval_shape(lambda: made(policy)), *heads, jax.ShapeDtypeStruct((1,), jnp.int32))
    device = SingleDeviceSharding(place.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), args)
    with lowering.for_device(place.kind, place.cores, place.platform):
        traced = jax.jit(step if steps == 1 else run, donate_argnums=0).trace(*args)
        return traced.lower(lowering_platforms=place.lowering).compile()


def check_in_place(program) -> None:
    written = [x for x in copies(program, POOL) if x.startswith("copy ")]
    assert written == []
    assert program.memory_analysis().alias_size_in_bytes >= 4 * POOL


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_copies_no_pool(chip, spec):
    check_in_place(compiled(chip, spec))


@pytest.mark.parametrize("chip", CHIPS)
def test_steps_in_one_kernel_copy_no_pool_and_start_little(chip, monkeypatch):
    """On a device that is on record for every body: nothing but the kernel touches keys and values."""
    impl = "triton" if chip == "h200" else "mosaic_tpu"
    monkeypatch.setattr(dispatch, "record", lambda op, kind: {"impl": impl, "agrees": True})
    program = compiled(chip, "sinks(4) + window(256)", steps=8)
    check_in_place(program)
    assert "decode_step" in program.as_text()
    assert copies(program, K * W * H) == []
    assert launches(program) <= LAUNCHES[chip]
