"""``python -m pallas_kernels.ragged_decode.bench``: against dense attention over the same live slots.

The dense rows hold the same keys and values contiguously, which no ragged cache can: "dense" reads them as
anyone would write it (einsum, softmax, einsum), "dense, tuned" by the products of ``products.py``. int8 is
compared with dense float32: four times its bytes. Targets are for one new token against 8k live slots a
stream and more, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import products, timing
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.ragged_decode.shapes import BENCH, Shape

REPEATS = 15
SELECTED = 8
"""One page in this many is read by the selections."""

MOST = {64: 1.5, 256: 1.3}
"""Slots of a page to the most a read may take, in times of "dense"."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrs,bksh->bkrh", p, v, preferred_element_type=jnp.float32)


def _tuned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(products.scores(q, k, q.shape[-1] ** -0.5), axis=-1)
    return products.mix(p, v)


def _times(shape: Shape, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    b, n, kv, t, h, pool, size, m = shape
    wide = "float32" if dtype == "int8" else dtype
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), wide)
    k, v = (jnp.asarray(rng.normal(size=(pool, size, h)) * 30, dtype) for _ in range(2))
    scales = jnp.full((pool, 2, h), 1 / 30, jnp.float32) if dtype == "int8" else None
    table = jnp.asarray(rng.permutation(pool)[: b * kv * m].reshape(b, kv, m), jnp.int32)
    length = jnp.full((b, kv), m * size, jnp.int32)
    some = jnp.asarray(rng.permuted(np.broadcast_to(np.arange(m), (b, kv, m)), axis=2)[..., : m // SELECTED])
    rows = [x[: b * kv * m].reshape(b, kv, m * size, h).astype(wide) for x in (k, v)]
    paged = (q, k, v, table, length)
    runs: dict[str, Callable[..., Any]] = {
        "dense": _dense,
        "dense, tuned": _tuned,
        "ragged": lambda *x: ragged_decode(*x, scales=scales),
        "with mass": lambda *x: ragged_decode(*x, scales=scales, mass=True),
        f"1/{SELECTED} of pages": lambda *x: ragged_decode(*x, scales=scales, pages=some),
    }
    contiguous = (q.reshape(b, kv, -1, h), *rows)
    args = {name: contiguous if name.startswith("dense") else paged for name in runs}
    return timing.in_turns(runs, args, REPEATS)


def _most(shape: Shape, dtype: str) -> dict[str, float]:
    judged = dtype == "bfloat16" and shape.T == 1 and shape.M * shape.S >= 8192
    return {"ragged": MOST[shape.S]} if judged else {}


def main() -> None:
    """Print one line a shape and dtype."""
    for name, shape in BENCH.items():
        for dtype in ("float32", "bfloat16", "int8"):
            times, most = _times(shape, dtype), _most(shape, dtype)
            print(timing.report("ragged_decode", name, dtype, times, "dense", most), flush=True)


if __name__ == "__main__":
    main()
