"""phi at serving size, for compilers and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case, size
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract
from pallas_kernels.phi.shapes import CHIP, Shape
from pallas_kernels.phi.summary import Summary

TILE = 512


def _build(impl: str) -> Callable[..., Any]:
    def run(log_k: Any, v: Any, there: Any) -> Any:
        return phi_build(log_k, v, there=there, impl=impl)

    return run


def _read(impl: str) -> Callable[..., Any]:
    """What a decode step does: all but the tokens it visits, for its queries."""

    def run(summary: Summary, log_k: Any, v: Any, there: Any, log_q: Any) -> Any:
        return phi_evaluate(phi_subtract(summary, log_k, v, there=there, impl=impl), log_q, impl=impl)

    return run


def _case(shape: Shape, dtype: str, *, read: bool = False) -> Case:
    b, n, kv, t, s, f, h, r = shape
    a, tokens = jax.ShapeDtypeStruct, r if read else s
    arrays = (
        a((b, kv, tokens, f), jnp.float32),
        a((b, kv, tokens, h), dtype),
        a((b, kv, tokens), bool),
    )
    row: Any = a((b, kv, f), jnp.float32)
    values: Any = a((b, kv, f, h), jnp.float32)
    summary = Summary(row, row, values)
    args = (summary, *arrays, a((b, n, t, f), jnp.float32)) if read else arrays
    out = a((b, n, t, h), jnp.float32) if read else summary
    tile, width = min(TILE, tokens), jnp.dtype(dtype).itemsize
    # GPU: partial sums of every 1024 tokens; elsewhere padded copies of odd sizes.
    parts = (1 + tokens // 1024) * b * kv * 4 * 128 * -(-h // 128) * 128
    return Case(
        run=_read if read else _build,
        args=args,
        moves=size(args, out),
        flops=2 * b * (kv * tokens + n * t * read) * f * h,
        temp=(8 << 20) + 4 * parts + (0 if h % 128 == 0 and not read else 4 * size(arrays)),
        whole=b * kv * s * f if f % 128 == 0 and s % 1024 == 0 and not read else 0,
        step=(tile * (4 * f + width * h), 2 * tile * f * h),
        kernel="phi_sums",
    )


def cases() -> dict[str, Case]:
    """Building over a prompt, what a decode step does, odd sizes."""
    return {
        "build_bfloat16": _case(CHIP["h128"], "bfloat16"),
        "read_bfloat16": _case(CHIP["h128"], "bfloat16", read=True),
        "odd_h64_build_float32": _case(CHIP["odd_h64"], "float32"),
        "odd_h64_read_float32": _case(CHIP["odd_h64"], "float32", read=True),
        "odd_h96_read_bfloat16": _case(CHIP["odd_h96"], "bfloat16", read=True),
    }
