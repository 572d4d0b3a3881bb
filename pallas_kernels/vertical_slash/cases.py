"""vertical_slash at serving size, for compilers and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case, size
from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.shapes import CHIP, Shape

BLOCK = 512


def _run(impl: str, window: int, capacity: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, admit: Any, lengths: Any) -> Any:
        options = {"window": window, "capacity": capacity, "lengths": lengths, "impl": impl}
        return vertical_slash(q, k, v, admit, **options)

    return run


def _case(shape: Shape, dtype: str, *, capacity: int | None = None, ragged: bool = False) -> Case:
    b, n, kv, t, h, window = shape
    a, held = jax.ShapeDtypeStruct, capacity or t
    q, k = a((b, n, t, h), dtype), a((b, kv, t, h), dtype)
    args = (q, k, k, a((b, kv, t), bool), a((b,), jnp.int32) if ragged else None)
    rows, keys = min(BLOCK, n // kv * t), min(BLOCK, t)
    lanes = -(-h // 128) * 128
    return Case(
        run=lambda impl: _run(impl, window, capacity),
        args=args,
        moves=size(args) + 4 * b * n * t * h,
        # Every packed key visible to half of the queries.
        flops=4 * b * n * t * (window + held // 2) * h,
        temp=(8 << 20) + 4 * b * (3 * n * -(-t // BLOCK) * BLOCK + 4 * kv * max(t, held)) * lanes,
        # Packing keys and marking what overflowed are passes over whole arrays, meant to be there.
        whole=0,
        step=(2 * keys * h * jnp.dtype(dtype).itemsize, 4 * rows * keys * h),
        kernel="vertical_slash",
    )


def cases() -> dict[str, Case]:
    """A quarter admitted, no bound, rows of differing length; other dtypes and head dims."""
    base = CHIP["h128"]
    return {
        "bfloat16_quarter": _case(base, "bfloat16", capacity=base.T // 4),
        "bfloat16_unbounded": _case(base, "bfloat16", ragged=True),
        "odd_float32": _case(CHIP["odd_h64"], "float32", capacity=200, ragged=True),
        "odd_h96_bfloat16": _case(CHIP["odd_h96"], "bfloat16"),
        "h256_bfloat16": _case(CHIP["h256"], "bfloat16", capacity=1000),
    }
