"""Pages in host memory, compiled for TPUs: no program copies a pool, on one device or several. ``-m aot``."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from chips import chip_or_skip

import kvjax
from kvjax.cache import hosted as hosting
from kvjax.cache import state as states
from kvjax.models.spec import ModelSpec, Rope
from kvjax.plan import _programs as programs
from kvjax.plan import _shapes as shapes
from kvjax.plan._deployment import Deployment
from kvjax.sharding import mesh as meshes

pytestmark = pytest.mark.aot

SPEC = ModelSpec(
    family="llama",
    vocab_size=4096,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    model_dim=1024,
    mlp_dim=2048,
    max_positions=1 << 17,
    rope=Rope(theta=1e4),
    tied=False,
    windows=(),
)
CONTEXT = 1 << 16
POOL = 2 * CONTEXT * 8 * (2 * 128 * 2 + 4)
"""Bytes of both layers' keys, values and positions, all of them in host memory."""

POLICIES = (
    "quest(chunks=32, chunk=64, dense=0) + host(cache=0.04)",
    "topk(0.01) + host(cache=0.02, keys=int4)",
)


def case(policy: str, tensor: int) -> tuple[Deployment, object]:
    target = chip_or_skip("v5e")
    mesh = meshes.mesh(f"tensor={tensor}", devices=target.devices[:tensor])
    if jax.__version_info__ < hosting.OLDEST:
        pytest.skip("this jax compiles no read of host memory inside a loop")
    return Deployment(SPEC, kvjax.policy(policy), mesh, 1, CONTEXT), target


# A minute of compiling each; that a mesh adds nothing is seen by one of them.
@pytest.mark.parametrize(
    ("policy", "tensor"),
    [
        (POLICIES[0], 4),
        (POLICIES[1], 1),
        pytest.param(POLICIES[0], 1, marks=pytest.mark.slow),
        pytest.param(POLICIES[1], 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_and_a_piece_of_a_prompt_copy_no_pool(policy, tensor):
    deployment, target = case(policy, tensor)
    step = programs.step(deployment, target, exact=True)
    prompt = programs.prefill(deployment, target)
    # A device's share of the pools, as host memory lays it out.
    assert step.host >= POOL / tensor
    assert step.host_temporary == prompt.host_temporary == 0
    # On the device neither makes anything of a pool's size: a prompt's piece holds a block of the list.
    assert step.temporary < POOL / tensor / 8
    assert prompt.temporary < POOL / tensor


@pytest.mark.parametrize("tensor", [1, 4])
def test_full_pages_move_in_place(tensor):
    deployment, _ = case(POLICIES[0], tensor)
    cache = shapes.layer_sizes(deployment)[0].cache
    move = functools.partial(states._moved, mesh=deployment.mesh)
    traced = jax.jit(move, donate_argnums=(0, 1)).trace(cache.pages, cache.hosted)
    memory = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes >= POOL / 2 / tensor
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < POOL / tensor / 8


def test_what_stays_on_the_device_of_half_a_million_tokens():
    """Llama-3.1-8B's caches at 524,288 tokens, 64 GiB in bfloat16; no compiler is asked."""
    spec = dataclasses.replace(SPEC, num_layers=32, num_heads=32, max_positions=1 << 19, windows=())
    mesh = meshes.mesh("tensor=1", devices=jax.devices()[:1])
    most = {"quest(chunks=32, chunk=64, dense=0) + host(cache=0.01)": 2.0}
    most |= {"topk(0.02) + host(cache=0.021, keys=int4)": 11.0}
    for policy, gib in most.items():
        deployment = Deployment(spec, kvjax.policy(policy), mesh, 1, 1 << 19)
        sizes = shapes.layer_sizes(deployment)
        assert sum(one.host for one in sizes) > 64 * 2**30
        assert sum(one.allocated for one in sizes) < gib * 2**30, policy
