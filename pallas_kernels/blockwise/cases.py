"""blockwise and column_mass at serving size, for compilers and costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.blockwise.shapes import CHIP, Shape
from pallas_kernels.cases import Case, size

WINDOW = 256
BLOCK = 512


def _forward(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return blockwise(q, k, v, **options)

    return run


def _gradient(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, *where: Any) -> Any:
        loss = lambda *x: _forward(impl, window)(*x, *where)[0].sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return run


def _mass(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, lse: Any, weights: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return column_mass(q, k, lse, weights, **options)

    return run


def _case(shape: Shape, dtype: str, what: str = "forward", *, admitted: bool = False) -> Case:
    b, n, kv, t, s, h = shape
    a, window = jax.ShapeDtypeStruct, WINDOW if admitted else None
    q, k = a((b, n, t, h), dtype), a((b, kv, s, h), dtype)
    where = (a((b, t), jnp.int32), a((b, s), jnp.int32), a((b, kv, s), bool) if admitted else None)
    pairs = b * n * (t * (s - t) + t * t // 2)
    mass = (q, k, a((b, n, t), jnp.float32), a((b, t), jnp.float32), *where)
    run, args, products = {
        "forward": (_forward, (q, k, k, *where), 2),
        "gradient": (_gradient, (q, k, k, *where), 2 + 8),
        "mass": (_mass, mass, 1),
    }[what]
    rows, keys = min(BLOCK, n // kv * t), min(BLOCK, s)
    # Padded to whole blocks and lanes: a float32 array of all queries and one of all keys.
    queries = 4 * b * kv * -(-n // kv * t // rows) * rows * max(h, 128)
    wide = queries + 4 * b * kv * -(-s // keys) * keys * max(h, 128)
    return Case(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) + 4 * b * n * t * h,
        flops=2 * products * pairs * h,
        # Backward also holds the output again and its gradient as it came, both before padding.
        temp=(8 << 20) + (4 * wide + 2 * queries if what == "gradient" else 2 * wide),
        whole=b * kv * s * h if h % 128 == 0 and s % BLOCK == 0 and what == "forward" else 0,
        step=(2 * keys * h * jnp.dtype(dtype).itemsize, 4 * rows * keys * h),
        kernel="column_mass" if what == "mass" else "blockwise",
    )


def cases() -> dict[str, Case]:
    """Reading a ring, a prompt, its gradient, its column mass; other dtypes and head dims."""
    prompt = CHIP["prompt"]
    return {
        "ring_bfloat16": _case(CHIP["ring"], "bfloat16"),
        "prompt_bfloat16": _case(prompt, "bfloat16"),
        "prompt_bfloat16_admitted": _case(prompt, "bfloat16", admitted=True),
        "prompt_bfloat16_gradient": _case(prompt, "bfloat16", "gradient"),
        "prompt_bfloat16_admitted_gradient": _case(prompt, "bfloat16", "gradient", admitted=True),
        "prompt_bfloat16_mass": _case(prompt, "bfloat16", "mass", admitted=True),
        "odd_float32_gradient": _case(CHIP["odd_h64"], "float32", "gradient"),
        "odd_bfloat16_mass": _case(CHIP["odd_h80"], "bfloat16", "mass"),
        "h256_bfloat16_gradient": _case(CHIP["h256"], "bfloat16", "gradient"),
    }
