"""The decode read with a selection and φ for chips that are not here: nothing is copied but what it picks.

See ``test_aot_ops`` for how to run it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from chips import chip_or_skip

import kvjax
from benchmarks.kernels.programs import copies
from kvjax import layer
from kvjax.algebra import Native
from kvjax.cache import pool
from kvjax.cache import ring as rings
from kvjax.cache.state import LayerCache
from kvjax.policies import phi
from pallas_kernels.measure import aot

pytestmark = pytest.mark.aot

CONTEXT, N, K, H, PAGE = 32768, 32, 8, 128, 256
SPECS = ("topk(0.01) + phi(64)", "quest(sinks=4, tail=16) + phi(64)")
EACH = [
    pytest.param(chip, spec, marks=() if (chip, spec) == ("v5e", SPECS[0]) else pytest.mark.slow)
    for chip in aot.CHIPS
    for spec in SPECS
]


def made(policy: kvjax.Policy) -> tuple[LayerCache, dict[str, jax.Array], jax.Array]:
    """A layer's cache of one row, its maps, a query."""
    window, dtype = policy.window(CONTEXT), jnp.dtype(jnp.bfloat16)
    entries = -(-(CONTEXT - window) // PAGE)
    pages = pool.empty(
        pages=K * (entries + 1),
        size=PAGE,
        rows=1,
        heads=K,
        lists=2,
        entries=entries,
        **Native().layout(PAGE, H, dtype),
        meta=(),
        summary=policy.selection.summary_shapes(PAGE, H),
    )
    cache = LayerCache(
        ring=rings.empty(1, K, window, H, dtype),
        pages=pages,
        summary=policy.completion.empty(1, K, H, CONTEXT),
    )
    shapes = phi.shapes(N, K, H, policy.completion.features, H // 2, symmetric=False)
    return cache, {name: jnp.zeros(shape) for name, shape in shapes.items()}, jnp.zeros((1, N, 1, H), dtype)


@pytest.mark.parametrize(("chip", "spec"), EACH)
def test_it_compiles_and_copies_no_pool(chip, spec):
    place = chip_or_skip(chip)
    policy = kvjax.policy(spec)

    def read(cache, maps, q):
        total = jnp.full(1, CONTEXT - 64)
        site = layer.LayerInfo(policy, {"completion": maps}, 3, 4, None, total)
        return layer.read_pages(site, cache, q, by=site.policy.selection).partials

    shapes = jax.eval_shape(lambda: made(policy))
    program = aot.compiled(place, read, *shapes)
    pool_size = shapes[0].pages.k.size
    assert copies(program, pool_size) == []
    # All keys' scores, what is picked, and its features; a copy of the keys alone would be twice the pool.
    assert program.memory_analysis().temp_size_in_bytes < pool_size
