"""A decode step in bfloat16 on a CPU reads weights and rings as they lie.

XLA on a CPU turns bfloat16 into float32 before many operations. Done to a whole weight, that costs five times
what the product does.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiled_in_full, written

import kvjax
from kvjax import decode
from kvjax.models import decoder
from kvjax.models.spec import Experts, ModelSpec, Rope
from kvjax.sampling import sampling
from kvjax.types import Params

LLAMA = ModelSpec(
    family="llama",
    vocab_size=331,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    model_dim=80,
    mlp_dim=176,
    max_positions=96,
    rope=Rope(theta=1e4),
    tied=False,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen": dataclasses.replace(LLAMA, family="qwen3", tied=True, qkv_bias=True, qk_norm=True),
    "gemma": dataclasses.replace(
        LLAMA,
        family="gemma2",
        tied=True,
        mlp="geglu",
        norm="rms_plus_one",
        post_norms=True,
        scaled_embedding=True,
        attn_softcap=50.0,
        final_softcap=30.0,
    ),
    "qwen_moe": dataclasses.replace(
        LLAMA, family="qwen3_moe", qk_norm=True, experts=Experts(count=6, chosen=2, width=96, normed=False)
    ),
    "gpt_oss": dataclasses.replace(
        LLAMA,
        family="gpt_oss",
        mlp="swiglu_clipped",
        qkv_bias=True,
        linear_bias=True,
        sinks=True,
        experts=Experts(count=6, chosen=2, width=176),
    ),
    "gpt2": dataclasses.replace(
        LLAMA,
        family="gpt2",
        tied=True,
        num_kv_heads=6,
        positions="learned",
        norm="layer",
        mlp="gelu",
        qkv_bias=True,
        linear_bias=True,
    ),
}
CONTEXT = 96

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="XLA of jax 0.7 has no kernel for rows of bfloat16"
)


def parameters(spec: ModelSpec) -> Params:
    """Shapes of the weights, in bfloat16."""
    shapes = decoder.shapes(spec)
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def compiled(spec: ModelSpec, rows: int, policy: str = "full") -> tuple[list[tuple[str, int, str]], int, int]:
    """What a step in bfloat16 writes, the entries of the smallest weight, and those of a ring."""
    network, chosen, params = decoder.Decoder(spec), kvjax.policy(policy), parameters(spec)
    state = decode.empty(network, chosen, rows=rows, context=CONTEXT, dtype=jnp.bfloat16)
    token, active = np.zeros(rows, np.int32), np.ones(rows, bool)
    lowered = decode.step_program.lower(network, chosen, params, {}, state, token, active)
    smallest = params["layers"][0]["wk"].size
    return list(written(compiled_in_full(lowered).as_text())), smallest, state.layers[0].ring.k.size


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_is_written_out_in_float32(family, rows):
    arrays, smallest, _ = compiled(FAMILIES[family], rows)
    assert arrays
    assert not [line for dtype, size, line in arrays if dtype == "f32" and size >= smallest]


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_experts_are_read_one_at_a_time(rows):
    """Nothing as large as two experts' matrices is written."""
    spec = FAMILIES["gpt_oss"]
    arrays, _, _ = compiled(spec, rows)
    one = spec.experts.width * spec.model_dim
    assert [line for _, size, line in arrays if size == one]
    assert not [line for _, size, line in arrays if size >= 2 * one]


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_ring_is_written_once(rows):
    """Keys and values by one pass each; no copy, no other dtype."""
    arrays, _, ring = compiled(LLAMA, rows)
    lines = [line for _, size, line in arrays if size == ring]
    assert len(lines) == 2, lines
    assert all(" = bf16[" in line for line in lines)


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_no_weight_is_prepared_before_a_loop_of_steps(drafted):
    """Neither transposed nor in float32: the program of one step would write all weights out once more."""
    spec = dataclasses.replace(LLAMA, tied=True)
    policy = kvjax.policy(
        "draft(quest(chunks=2, chunk=8, dense=0, recent=24), most=2)" if drafted else "full"
    )
    network, params, rows = decoder.Decoder(spec), parameters(spec), 2
    state = decode.empty(network, policy, rows=rows, context=CONTEXT, dtype=jnp.bfloat16, page=16)
    state = decode.reserve(policy, state, 8, 1)
    writer = decode.DecodeRows(
        token=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        left=jnp.full(rows, 8),
        stops=jnp.full(1, -1),
        how=sampling(rows),
    )
    if drafted:
        like = (params, {}, state, writer, jnp.asarray(8))
        lowered = decode.drafted_steps.lower(network, policy, 8, 2, *like)
    else:
        lowered = decode.decode_steps.lower(network, policy, 8, params, {}, state, writer)
    text = compiled_in_full(lowered).as_text()
    sizes = {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    assert "while(" in text
    assert not [line for _, size, line in written(text) if size in sizes]
