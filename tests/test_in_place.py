"""A compiled segment writes rings and pools where they are: none of them is copied in a step."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiler import compiled_in_full

import kvjax
from kvjax import decode
from kvjax.cache import write
from kvjax.cache.state import KVState
from kvjax.sampling import sampling

SPECS = (
    "window(24) + sinks(4)",
    "knorm + uniform(40, every_step) + recent(24)",
    pytest.param("conf_kv(recent=24) + confidence(40, loose=64)", marks=pytest.mark.slow),
    "conf_kv(recent=24) + int8(32) + confidence(40, loose=64)",
    pytest.param("snapkv(24) + uniform(40, every(8))", marks=pytest.mark.slow),
    pytest.param("int8(24)", marks=pytest.mark.slow),  # codes and their scales are in the one above, too
    "kivi(2, recent=24, group=8)",
    pytest.param("fp8(24, hadamard=True)", marks=pytest.mark.slow),
    "write_gate(0.5, window=24) + quest(chunks=2, chunk=8)",
)
PAGE = 16


def compiled(spec: str, dtype: jnp.dtype = jnp.float32) -> tuple[str, set[str]]:
    """The text of a loop over decode steps, and the shapes of its rings and pools."""
    model, policy = tiny.model(), kvjax.policy(spec)
    weights = {p.place: p.example_weights(jax.random.PRNGKey(0), model.network) for p in policy.learned}
    state = decode.empty(model.network, policy, rows=1, context=96, dtype=dtype, page=PAGE)
    state = decode.reserve(policy, state, 64, 1)
    rooms = [x for one in state.layers for x in (one.ring, *one.pools)]
    shapes = {",".join(map(str, x.shape)) for room in rooms for x in (room.k, room.v)}

    def steps(state: KVState, token: jax.Array) -> tuple[KVState, jax.Array]:
        def one(_: int, carry: tuple[KVState, jax.Array]) -> tuple[KVState, jax.Array]:
            state, token = carry
            active = token >= 0
            state, logits = decode.step(model.network, policy, model.params, weights, state, token, active)
            return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 8, one, (state, token))

    run = jax.jit(steps, donate_argnums=0)
    return compiled_in_full(run.lower(state, jnp.zeros(1, jnp.int32))).as_text(), shapes


@pytest.mark.parametrize("spec", SPECS)
def test_no_ring_and_no_pool_is_copied(spec):
    text, shapes = compiled(spec)
    assert "while" in text
    copied = set(re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text))
    assert not copied & shapes


@pytest.mark.parametrize("spec", [SPECS[-1], "quest(chunks=2, chunk=8, recent=24)"])
def test_no_pool_of_bfloat16_becomes_bits(spec):
    text, shapes = compiled(spec, jnp.bfloat16)
    assert any(f"bf16[{shape}]" in text for shape in shapes)
    assert not any(f"u16[{shape}]" in text for shape in shapes)


def test_a_slot_of_each_page_is_written_as_any_slots_are():
    rng = np.random.default_rng(0)
    old, value = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((9, 4, 8), (2, 3, 1, 8)))
    page = jnp.asarray([[[4], [9], [0]], [[8], [1], [12]]])  # 9 and 12 are no pages
    slot = jnp.asarray(rng.integers(4, size=page.shape))
    ours = jax.jit(write.one_a_page)(old, page, slot, value)
    np.testing.assert_array_equal(ours, write.scattered(old, (page, slot), value))
    assert (np.asarray(ours) != np.asarray(old)).any(axis=(1, 2)).sum() == 4


@pytest.mark.slow
def test_rounds_of_drafts_copy_none():
    """Drafts and verification read beside the cache, and what stands is written where it belongs."""
    model = tiny.model()
    policy = kvjax.policy("draft(quest(chunks=2, chunk=8, dense=0, recent=24), most=2)")
    state = decode.empty(model.network, policy, rows=1, context=96, dtype=jnp.float32, page=PAGE)
    state = decode.reserve(policy, state, 64, 1)
    shapes = {
        ",".join(map(str, x.shape))
        for one in state.layers
        for room in (one.ring, *one.pools)
        for x in (room.k, room.v)
    }
    rows = decode.DecodeRows(
        token=jnp.zeros(1, jnp.int32),
        done=jnp.zeros(1, bool),
        left=jnp.full(1, 50),
        stops=jnp.full(1, -1),
        how=sampling(1),
    )
    inputs = (model.params, {}, state, rows, jnp.asarray(32))
    text = compiled_in_full(decode.drafted_steps.lower(model.network, policy, 64, 2, *inputs)).as_text()
    assert "while" in text
    assert not set(re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)) & shapes
