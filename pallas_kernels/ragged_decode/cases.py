"""ragged_decode at serving size, for compilers and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case, size
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.ragged_decode.shapes import CHIP, Shape

ITEM = 1024
"""Slots of an item of the TPU body when queries are few."""


def _run(impl: str, mass: bool) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, table: Any, length: Any, more: Any) -> Any:
        return ragged_decode(q, k, v, table, length, mass=mass, impl=impl, **more)

    return run


def _case(shape: Shape, dtype: str, *, mass: bool = False, pages: int = 0) -> Case:
    b, n, kv, t, h, pool, slots, m = shape
    a, width = jax.ShapeDtypeStruct, jnp.dtype(dtype).itemsize
    q = a((b, n, t, h), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    pages_of = a((pool, slots, h), dtype)
    more: dict[str, Any] = {"scales": a((pool, 2, h), jnp.float32)} if dtype == "int8" else {}
    if pages:
        more["pages"], more["slots"] = a((b, kv, pages), jnp.int32), a((b, kv, pages, slots), bool)
    read = b * kv * (pages or m) * slots
    rows = n // kv * t
    out = a((b, n, t, h), jnp.float32)
    received = 4 * b * n * m * slots if mass else 0
    # Tiles of mass. GPU: at least 16 rows for G heads, summed over blocks of 64 queries. TPU: whole tiles of
    # 8 rows, in the kernel's order, in the lists' order, and summed.
    gpu = max(16, n // kv) * kv // n * max(1, rows // 64)
    tiles = max(3 * -(-n // kv // 8) * 8 * kv // n, gpu)
    # TPU: pools of short heads and short pages are copied to rows of whole lanes, scales of short heads too.
    in_place, wide = h % 128 == 0 or slots % 128 == 0, -(-h // 128) * 128
    copies = 0 if in_place else 2 * pool * slots * wide * width
    copies += 0 if h % 128 == 0 else 2 * pool * 4 * 128
    item = min(ITEM, (pages or m) * slots)
    return Case(
        run=lambda impl: _run(impl, mass),
        args=(q, pages_of, pages_of, a((b, kv, m), jnp.int32), a((b, kv), jnp.int32), more),
        moves=2 * read * h * width
        + (8 * read // slots * h if dtype == "int8" else 0)
        + size(q, out)
        + received,
        flops=4 * read * h * rows,
        temp=(8 << 20) + 64 * size(q) * wide // h + copies + tiles * received,
        whole=pool * slots * h if in_place else 0,
        step=(2 * item * h * width, 4 * item * h * rows),
        kernel="ragged_decode_read",
    )


def cases() -> dict[str, Case]:
    """By dtype, by what is asked for, by head dim."""
    base = CHIP["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "int8": _case(base, "int8"),
        "float32": _case(CHIP["small_h128"], "float32"),
        "int8_mass": _case(base, "int8", mass=True),
        "bfloat16_selected_mass": _case(base, "bfloat16", mass=True, pages=16),
        "bfloat16_page16": _case(CHIP["page16"], "bfloat16"),
        "int8_page32": _case(CHIP["page32"], "int8"),
        "bfloat16_chunk_mass": _case(CHIP["chunk"], "bfloat16", mass=True),
        "bfloat16_h256": _case(CHIP["h256"], "bfloat16"),
        "bfloat16_h64": _case(CHIP["h64"], "bfloat16"),
        "bfloat16_h64_page128_mass": _case(CHIP["h64_page128"], "bfloat16", mass=True),
        "int8_h96": _case(CHIP["h96"], "int8"),
        "bfloat16_h80": _case(CHIP["h80"], "bfloat16"),
    }
