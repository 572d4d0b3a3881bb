"""The prefill kernel on Hopper: its sizes, operands and shared memory, and in which order it reads tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.hopper import ROWS, SHARED, WIDE, plgpu, tiled

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FAR = 2**31 - 1
"""The position of a key that nobody sees, and whose value may hold anything."""

HEAD_DIMS = (64, 128)


class PrefillSizes(NamedTuple):
    """Static sizes of a call.

    Attributes:
      name: of the kernel.
      h: head dim.
      block: keys of a tile.
      stages: buffers of keys, and as many of values.
      readers: warpgroups that multiply.
      scale, softcap: of scores.
      bounded: whether queries see no keys before some position.
      dtype: of the output.
      interpret: how Pallas runs the kernel; None compiles it.
    """

    name: str
    h: int
    block: int
    stages: int
    readers: int
    scale: float
    softcap: float | None
    bounded: bool
    dtype: Any
    interpret: Any

    @property
    def queries(self) -> int:
        return self.readers * ROWS


class Queries(NamedTuple):
    """Queries in whole blocks: of the heads of a KV head one after another.

    Attributes:
      q: queries.
      sees: for each part of the keys the last position that a query sees, and the last position before those
        that it does not see, used if ``PrefillSizes.bounded``.
    """

    q: Float[Array, "B K R H"]
    sees: Int[Array, "B parts 2 R"]


class Keys(NamedTuple):
    """A part of the keys, in whole tiles.

    Attributes:
      at: position of each key, ``FAR`` for keys that nobody sees; Z is K, or 1 for all heads.
      near: position to compare with the second of ``Queries.sees``; None: ``at``.
    """

    k: Any
    v: Any
    at: Any
    near: Any | None


class Program(NamedTuple):
    """Indices of a program."""

    row: Array
    head: Array
    block: Array


class KeyTile(NamedTuple):
    """A tile of keys: its part, its number there, and whether some of its values may hold anything."""

    part: Array | int
    tile: Array
    dirty: Array


class TileOrder(Protocol):
    """Which tiles each block of queries reads; ``refs`` are those of the arrays that come with it."""

    def counts(self, refs: list[Any], program: Program) -> tuple[Array, Array]:
        """Tiles that are seen whole, and all."""

    def tile(self, refs: list[Any], program: Program, c: Array) -> KeyTile:
        """The c-th of them; those seen whole come first and are not dirty."""

    def lost(self, refs: list[Any], program: Program) -> Array | None:
        """Whether keys are missing, so that the answer is NaN; None if none ever are."""


class Operands(NamedTuple):
    """References of inputs and outputs."""

    q: Any
    sees: Any
    parts: list[Keys]
    order: list[Any]
    out: Any
    lse: Any


class Shared(NamedTuple):
    """Shared memory of a program, and its barriers."""

    q: Any
    sees: Any
    k: Any
    v: Any
    at: Any
    weights: Any
    out: Any
    lse: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    clean: Any


def memory(sizes: PrefillSizes, parts: int, marks: int) -> Shared:
    """``marks``: number of positions of a key."""
    smem, exact, n, wide = plgpu.SMEM, jnp.bfloat16, sizes.readers, tiled(sizes.h, jnp.bfloat16)
    ring = smem((sizes.stages, sizes.block, sizes.h), exact, transforms=wide)
    free = plgpu.Barrier(num_arrivals=n, num_barriers=sizes.stages)
    return Shared(
        q=smem((n, ROWS, sizes.h), exact, transforms=wide),
        sees=smem((n, parts, 2, ROWS), jnp.int32),
        k=ring,
        v=ring,
        at=smem((sizes.stages, marks, sizes.block), jnp.int32),
        weights=smem((n, ROWS, sizes.block), exact, transforms=tiled(sizes.block, exact)),
        out=smem((n, ROWS, WIDE), sizes.dtype, transforms=tiled(WIDE, sizes.dtype)),
        lse=smem((n, ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=n * (1 + 2 * parts)),
        k_full=plgpu.Barrier(num_arrivals=1, num_barriers=sizes.stages),
        v_full=plgpu.Barrier(num_arrivals=1 + marks, num_barriers=sizes.stages),
        k_free=free,
        v_free=free,
        clean=plgpu.Barrier(num_arrivals=n),
    )


def buffers(sizes: PrefillSizes) -> int:
    """How many of ``sizes.stages`` fit in shared memory."""
    fixed = sizes.readers * ROWS * (2 * (sizes.h + sizes.block) + 4 * (WIDE + 8))
    return max(1, min(sizes.stages, (SHARED - fixed) // (sizes.block * (4 * sizes.h + 8))))


def refuse(op: str, k: Array, interpret: Any) -> None:
    """Raises ``Unsupported`` where the kernel cannot run, with the reason."""
    reasons = {
        f"keys of {k.dtype}; the body multiplies bfloat16": k.dtype != jnp.bfloat16,
        f"head dim {k.shape[3]}; the body's tiles have 64 or 128 channels": k.shape[3] not in HEAD_DIMS,
        f"keys of {k.size} elements; more than 31 bits of them were never compiled": k.size >= 1 << 31,
    }
    hopper.refuse(op, interpret, reasons)
