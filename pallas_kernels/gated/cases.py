"""gated at training size, for compilers and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case, size
from pallas_kernels.gated.api import gated
from pallas_kernels.gated.shapes import CHIP, Shape

BLOCK = 512


def _forward(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        return gated(q, k, v, log_gate, lengths=lengths, window=window, impl=impl)

    return run


def _gradient(impl: str, window: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, log_gate: Any, lengths: Any) -> Any:
        def loss(*x: Any) -> Any:
            out, lse = _forward(impl, window)(*x, lengths)
            return jnp.sum(out * out) + jnp.sum(lse)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, log_gate)

    return run


def _case(shape: Shape, dtype: str, *, gradient: bool = False, ragged: bool = False) -> Case:
    b, n, kv, t, h, window = shape
    a = jax.ShapeDtypeStruct
    q, k = a((b, n, t, h), dtype), a((b, kv, t, h), dtype)
    args = (q, k, k, a((b, kv, t), jnp.float32), a((b,), jnp.int32) if ragged else None)
    run, products = (_gradient, 2 + 7) if gradient else (_forward, 2)
    tile = min(BLOCK, t)
    # Padded to whole tiles and lanes: a float32 array of every head's outputs.
    wide = 4 * b * n * -(-t // BLOCK) * BLOCK * -(-h // 128) * 128
    return Case(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) * (2 if gradient else 1) + 4 * b * n * t * h,
        flops=products * b * n * t * t * h,
        temp=(8 << 20) + (10 if gradient else 3) * wide,
        whole=b * kv * t * h if h % 128 == 0 and t % BLOCK == 0 and not gradient and not ragged else 0,
        step=(2 * tile * h * jnp.dtype(dtype).itemsize, 4 * tile * tile * h),
        kernel="gated_forward",
    )


def cases() -> dict[str, Case]:
    """Forward and gradient; rows of differing length; other dtypes and head dims."""
    base = CHIP["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "bfloat16_gradient": _case(base, "bfloat16", gradient=True),
        "bfloat16_ragged_gradient": _case(base, "bfloat16", gradient=True, ragged=True),
        "odd_float32_gradient": _case(CHIP["odd_h64"], "float32", gradient=True),
        "odd_h96_bfloat16_gradient": _case(CHIP["odd_h96"], "bfloat16", gradient=True, ragged=True),
        "h256_bfloat16_gradient": _case(CHIP["h256"], "bfloat16", gradient=True),
    }
