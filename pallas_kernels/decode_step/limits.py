"""What the bodies of decode_step do not take, known from shapes alone: asked before anything is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.decode_step.call import Cache

if TYPE_CHECKING:
    from jaxtyping import Array

LANES, ROWS = 128, 16
"""Of a TPU's tile of bfloat16; queries of a group are padded to as many rows for a GPU's products."""

RING = 1024
"""Most slots of a ring on a TPU: it is copied whole, with a list's first pages."""

RING_GPU = 4096
"""And on a GPU: its items are joined with those of the pages."""

SMEM_WORDS = 192 << 10
"""Page ids that fit a TPU's scalar memory beside what else is there."""


VMEM = 24 << 20
"""Bytes of queries and answers; a body may use twice that (``compat``, which is slow to import)."""


def refusal(impl: str, q: Array, cache: Cache, table: Array) -> str | None:
    """Why a body cannot run a call of these shapes, as a sentence with the way out; None if it can."""
    found = {"mosaic_tpu": _tpu, "triton": _triton}[impl](q, cache, table)
    dtypes = {x.dtype.name for x in (q, cache.ring_k, cache.k_pages)}
    if dtypes != {"bfloat16"}:
        found = f"arrays of {', '.join(sorted(dtypes))}; it is written for bfloat16"
    return f"decode_step(impl={impl!r}): {found}. Use impl='xla'." if found else None


def _tpu(q: Array, cache: Cache, table: Array) -> str:
    (b, heads, window, h), size, m = cache.ring_k.shape, cache.k_pages.shape[1], table.shape[2]
    if h % LANES:
        return f"a head dim of {h}; tiles have {LANES} lanes"
    if size % ROWS or window % ROWS or (window > size and window % size) or window > RING:
        return (
            f"pages of {size} slots and a ring of {window}; both are multiples of {ROWS}, a ring is whole "
            f"pages or shorter than one, and {RING} slots at most"
        )
    if b * heads * m > SMEM_WORDS:
        return f"tables of {b * heads * m} pages; scalar memory holds {SMEM_WORDS}"
    rows = -(-q.shape[1] // heads // ROWS) * ROWS
    held = b * heads * (2 * h * (2 * rows + 2 * ROWS) + 4 * LANES * rows)
    if held > VMEM:
        return f"{b * heads} streams, whose queries and answers take {held} bytes of VMEM"
    return ""


def _triton(q: Array, cache: Cache, table: Array) -> str:
    (_, heads, window, h), size, g = (
        cache.ring_k.shape,
        cache.k_pages.shape[1],
        q.shape[1] // cache.ring_k.shape[1],
    )
    del table
    if h & (h - 1) or not ROWS <= h <= 2 * LANES or size & (size - 1):
        wide = f"of {ROWS} to {2 * LANES} channels"
        return f"a head dim of {h} and pages of {size} slots; tiles are powers of two, {wide}"
    if window > RING_GPU:
        return f"a ring of {window} slots; items of {RING_GPU} are joined"
    if g > ROWS:
        return f"{g * heads} query heads over {heads}; a tile has {ROWS} of a group"
    if max(cache.ring_k.size, cache.k_pages.size) >= 1 << 31:
        return (
            f"a ring or pool of {max(cache.ring_k.size, cache.k_pages.size)} elements; offsets have 31 bits"
        )
    return ""
