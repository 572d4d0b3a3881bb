"""A decode layer over many chips: the read of pages needs no collective, the layer exactly one sum."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chips import chip_or_skip
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.kernels.programs import copies
from pallas_kernels import ragged_decode

pytestmark = pytest.mark.aot

MESHES = {"v5e:2x4": (1, 8), "v5e:8x8": (8, 8), "v5e:16x16": (32, 8)}
COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def layer(mesh):
    """Projection, a read of each chip's own pages, projection back; heads over 8 chips, rows over others."""
    rows, heads, lists = PartitionSpec("data"), PartitionSpec("data", "model"), PartitionSpec("data", "model")
    pool = PartitionSpec(("data", "model"))

    def read(q, k, v, table, length):
        return ragged_decode(q, k, v, table, length, impl="mosaic_tpu")[0]

    # The interpreter of types of shard_map knows nothing of a kernel's outputs.
    local = jax.shard_map(
        read, mesh=mesh, in_specs=(heads, pool, pool, lists, lists), out_specs=heads, check_vma=False
    )

    def run(x, w_in, w_out, k, v, table, length):
        q = jnp.einsum("bd,dnh->bnh", x, w_in)[:, :, None]
        out = local(q, k, v, table, length)[:, :, 0].astype(x.dtype)
        return jax.lax.with_sharding_constraint(
            x + jnp.einsum("bnh,nhd->bd", out, w_out), NamedSharding(mesh, rows)
        )

    return run


@pytest.mark.parametrize("topology", MESHES)
def test_one_sum_a_layer_and_pools_in_place(topology):
    devices = chip_or_skip("v5e", topology).devices
    data, model = MESHES[topology]
    mesh = Mesh(np.array(devices).reshape(data, model), ("data", "model"))
    rows, n, kv, h, d, slots, m = 8 * data, 32, 8, 128, 4096, 64, 64
    pages = rows * kv * m // 2

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    pool = shape((pages, slots, h), jnp.bfloat16, ("data", "model"))
    program = (
        jax.jit(layer(mesh))
        .trace(
            shape((rows, d), jnp.bfloat16, "data"),
            shape((d, n, h), jnp.bfloat16, None, "model"),
            shape((n, h, d), jnp.bfloat16, "model"),
            pool,
            pool,
            shape((rows, kv, m), jnp.int32, "data", "model"),
            shape((rows, kv), jnp.int32, "data", "model"),
        )
        .lower()
        .compile()
    )
    assert collections.Counter(COLLECTIVE.findall(program.as_text())) == {"all-reduce": 1}
    moved = copies(program, pages * slots * h // len(devices))
    assert [x for x in moved if x.endswith(f",{slots},{h}]")] == []  # weights may be moved, pools may not
