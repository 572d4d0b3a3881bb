"""The second kernel of ragged_decode on Hopper: a program a block of queries, which joins their partials.

The order is fixed, so that the same call gives the same bits. Partials come by TMA through a ring of their
own, which the one warpgroup fills and reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles
from pallas_kernels.hopper import launch, plgpu
from pallas_kernels.ragged_decode.mosaic_gpu_sizes import HopperSizes, held_tiles

if TYPE_CHECKING:
    from jaxtyping import Array, Float

RING = 16
"""Partials under way at most."""

BYTES = 96 << 10
"""Of shared memory for them."""

LN2 = math.log(2.0)


def _layout() -> Any:
    """Rows over warps and half-warps, 4 channels a thread: statistics of a row go to all its channels."""
    tiling = plgpu.Tiling(((8, 64), (2, 64), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _partials(sizes: HopperSizes, length: Array) -> Array:
    """Number of partials: of every reader in each item but the last, there of readers that have a tile."""
    held = held_tiles(sizes, length)
    full = jnp.maximum(jax.lax.div(held + (sizes.tiles - 1), jnp.int32(sizes.tiles)) - 1, 0)
    return full * sizes.readers + jnp.minimum(held - full * sizes.tiles, sizes.readers)


def _body(sizes: HopperSizes, ring: int) -> Any:
    def body(
        o: Any, stats: Any, length: Any, out: Any, lse: Any, o_s: Any, stats_s: Any, lse_s: Any, full: Any
    ) -> None:
        z = jax.lax.axis_index("z")
        count = _partials(sizes, length[jax.lax.div(z, jnp.int32(sizes.blocks))])
        rows, wide = _layout().reduce(1), _layout()

        def spread(x: Array) -> Array:
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (sizes.rows, sizes.h), [0]), wide)

        def fetch(i: Array) -> None:
            at = jax.lax.rem(i, jnp.int32(ring))
            plgpu.copy_gmem_to_smem(o.at[z, i], o_s.at[at], full.at[at])
            plgpu.copy_gmem_to_smem(stats.at[z, i], stats_s.at[at], full.at[at])

        def step(i: Array, carry: tiles.Stats) -> tiles.Stats:
            at = jax.lax.rem(i, jnp.int32(ring))
            plgpu.barrier_wait(full.at[at])
            m, l = (plgpu.layout_cast(stats_s[at, which, pl.ds(0, sizes.rows)], rows) for which in range(2))
            x = plgpu.layout_cast(o_s[at], wide)
            before, total, sums = carry
            new = jnp.maximum(before, m)
            shift = jnp.where(new > tiles.HIDDEN, new, 0.0)
            keep, weight = jnp.exp2(before - shift), jnp.exp2(m - shift)

            @pl.when(i + ring < count)
            def _() -> None:
                plgpu.commit_smem()  # TMA overwrites what was just read
                fetch(i + ring)

            return new, total * keep + l * weight, sums * spread(keep) + x * spread(weight)

        for i in range(ring):

            @pl.when(i < count)
            def _(i: int = i) -> None:
                fetch(jnp.int32(i))

        def start(x: float, shape: tuple[int, ...], layout: Any) -> Array:
            return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)

        nothing = (
            start(tiles.HIDDEN, (sizes.rows,), rows),
            start(0.0, (sizes.rows,), rows),
            start(0.0, (sizes.rows, sizes.h), wide),
        )
        m, l, sums = jax.lax.fori_loop(0, count, step, nothing)
        some = l != 0  # NaN is something
        safe = jnp.where(some, l, 1.0)
        scale = jnp.where(some, 1.0 / safe, 0.0)
        o_s[0] = sums * spread(scale)
        lse_s[...] = jnp.where(some, m * LN2 + jnp.log(safe), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s.at[0, pl.ds(0, out.shape[1])], out.at[z])
        plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, lse.shape[1])], lse.at[z])
        plgpu.wait_smem_to_gmem(0)

    return body


def join(
    sizes: HopperSizes, o: Float[Array, "Z J R H"], stats: Float[Array, "Z J 2 Y"], length: Array
) -> tuple[Float[Array, "Z R H"], Float[Array, "Z R"]]:
    """Partials of items to (out, lse) of their queries; rows beyond the queries, if any, hold anything."""
    z, partials = o.shape[:2]
    ring = max(1, min(RING, partials, BYTES // (4 * sizes.rows * sizes.h)))
    rows = sizes.total if sizes.blocks == 1 else sizes.rows
    shapes = [(z, rows, sizes.h), (z, -(-rows // 4) * 4)]  # TMA writes 16 bytes, or more
    run = launch(
        sizes.interpret,
        _body(sizes, ring),
        "ragged_decode_join",
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=[
            plgpu.SMEM((ring, *o.shape[2:]), jnp.float32),
            plgpu.SMEM((ring, *stats.shape[2:]), jnp.float32),
            plgpu.SMEM((sizes.rows,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
        ],
        grid=(z,),
        grid_names=("z",),
    )
    out, lse = run(o, stats, length)
    return out, lse
