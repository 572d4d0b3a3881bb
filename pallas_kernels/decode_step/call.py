"""What a call of decode_step is made of (fields as in ``api.decode_step``), and what its bodies do not take.

``refusal`` knows it from shapes alone, before anything is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class Cache(NamedTuple):
    """What a step changes, all of one dtype.

    Attributes:
      ring_k, ring_v: the newest W tokens of each KV head, token p in slot p mod W.
      k_pages, v_pages: a pool; each list names its own pages.
    """

    ring_k: Float[Array, "B K W H"]
    ring_v: Float[Array, "B K W H"]
    k_pages: Float[Array, "P S H"]
    v_pages: Float[Array, "P S H"]


class Token(NamedTuple):
    """The new token of each row."""

    q: Float[Array, "B N H"]
    k: Float[Array, "B K H"]
    v: Float[Array, "B K H"]


class Lists(NamedTuple):
    """The pages of each KV head, and whether the token that leaves its ring goes there."""

    table: Int[Array, "B K M"]
    length: Int[Array, "B K"]
    seen: Int[Array, " B"]
    enters: Bool[Array, "B K"]


LANES, ROWS = 128, 16
"""A TPU's tile of bfloat16; the queries of a group are padded to as many rows for a GPU's products."""

RING = 1024
"""Most slots of a ring on a TPU: it is copied whole, with a list's first pages."""

RING_GPU = 4096
"""Most slots of a ring on a GPU: its items are joined with those of the pages."""

SMEM_WORDS = 192 << 10
"""Page ids that fit a TPU's scalar memory."""

VMEM = 24 << 20
"""Bytes of queries and answers; a body may use twice that (``compat``, which is slow to import)."""


def refusal(impl: str, q: Array, cache: Cache, table: Array) -> str | None:
    """Why a body cannot run a call of these shapes, as a sentence with the way out; None if it can."""
    why = {"mosaic_tpu": _tpu, "triton": _triton}[impl](q, cache, table)
    dtypes = {x.dtype.name for x in (q, cache.ring_k, cache.k_pages)}
    if dtypes != {"bfloat16"}:
        why = f"arrays of {', '.join(sorted(dtypes))}; it is written for bfloat16"
    return f"decode_step(impl={impl!r}): {why}. Use impl='xla'." if why else None


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
        return f"{b * heads} KV heads, whose queries and answers take {held} bytes of VMEM"
    return ""


def _triton(q: Array, cache: Cache, table: Array) -> str:
    (_, heads, window, h), size = cache.ring_k.shape, cache.k_pages.shape[1]
    g, largest = q.shape[1] // heads, max(cache.ring_k.size, cache.k_pages.size)
    if h & (h - 1) or not ROWS <= h <= 2 * LANES or size & (size - 1):
        wide = f"of {ROWS} to {2 * LANES} channels"
        return f"a head dim of {h} and pages of {size} slots; tiles are powers of two, {wide}"
    if window > RING_GPU:
        return f"a ring of {window} slots; items of {RING_GPU} are joined"
    if g > ROWS:
        return f"{g * heads} query heads over {heads}; a tile has {ROWS} of a group"
    if largest >= 1 << 31:
        return f"a ring or pool of {largest} elements; offsets have 31 bits"
    return ""
