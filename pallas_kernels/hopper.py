"""What bodies for Hopper (H100, H200) share, written in Pallas' Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat, lowering
from pallas_kernels.dispatch import Unsupported

if TYPE_CHECKING:
    from jaxtyping import Array, Float

plgpu = compat.mosaic_gpu()

ROWS = 64
"""Of a warpgroup's product."""

SHARED = 226 << 10
"""Bytes of shared memory for a body's arrays, of 227 KiB: barriers take some too."""

WIDE = 32
"""Columns of an output that are written at once."""


def refuse(op: str, interpret: Any, reasons: Mapping[str, bool]) -> None:
    """Raises ``Unsupported`` if this is not a Hopper, or with the first of the reasons that holds."""
    kind = lowering.kind()
    device = f"a device that is not a Hopper ({kind}), whose wgmma and TMA the body is made of"
    for reason, holds in {device: not interpret and not lowering.is_hopper(kind), **reasons}.items():
        if holds:
            raise Unsupported(f"{op}(impl='mosaic_gpu'): {reason}. Use impl='triton', 'xla' or None.")


def tiled(width: int, dtype: Any) -> tuple[Any, Any]:
    """How rows of shared memory lie for TMA and products: in tiles of 8 rows and 128 bytes, swizzled."""
    size = jnp.dtype(dtype).itemsize
    row = min(128, width * size)
    return plgpu.TilingTransform((8, row // size)), plgpu.SwizzleTransform(row)


def start(x: float, shape: tuple[int, ...]) -> Float[Array, " ..."]:
    """x as a warpgroup holds the results of products (two axes) or a number a row of them (one axis)."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)


def spread(x: Array, shape: tuple[int, ...], axis: int = 0) -> Array:
    """x [R] or, along axis 1, [S], over a tile."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def write(x: Float[Array, "R Y"], staged: Any, target: Any) -> None:
    """Write the first rows of what a warpgroup holds, ``WIDE`` columns at a time.

    Args:
      x: that.
      staged: shared memory [R, WIDE] for it.
      target: reference of as many rows as are written, [rows, Y].
    """
    for c in range(0, x.shape[1], WIDE):
        staged[...] = x[:, c : c + WIDE].astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, target.shape[0])], target.at[:, pl.ds(c, WIDE)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(interpret: Any, body: Callable[..., None], name: str, **more: Any) -> Callable[..., Any]:
    """A kernel: ``body`` over a grid, compiled (None) or not; ``more`` is what ``plgpu.kernel`` takes."""
    return plgpu.kernel(
        body,
        kernel_name=name,
        # Nothing is reduced across warps, which is what memory would be kept for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128),
        **({} if interpret is None else {"interpret": interpret}),
        **more,
    )
