"""ragged_decode: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import rivals
from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels import products, tuning
from pallas_kernels.measure.work import size
from pallas_kernels.ragged_decode import mosaic_tpu
from pallas_kernels.ragged_decode.api import ragged_decode
from pallas_kernels.ragged_decode.work import (
    CODES,
    TIMED_8K,
    TINY,
    RaggedDecodeSizes,
    read,
    stored_width,
    timed_call,
)

DTYPES = ("float32", "bfloat16", "int8")

BENCH = {
    "one_row": RaggedDecodeSizes(B=1, N=10, K=5, T=1, H=64, P=640, S=64, M=128),
    "one_row_p256": RaggedDecodeSizes(B=1, N=10, K=5, T=1, H=64, P=160, S=256, M=32),
    "rows_8k": RaggedDecodeSizes(B=4, N=16, K=4, T=1, H=64, P=2048, S=64, M=128),
    "rows_8k_p256": RaggedDecodeSizes(B=4, N=16, K=4, T=1, H=64, P=512, S=256, M=32),
    "one_row_32k": RaggedDecodeSizes(B=1, N=10, K=5, T=1, H=64, P=2560, S=64, M=512),
    "batch": RaggedDecodeSizes(B=8, N=32, K=8, T=1, H=64, P=2048, S=64, M=32),
    "chunk": RaggedDecodeSizes(B=1, N=4, K=2, T=256, H=64, P=64, S=64, M=32),
}
LARGE: dict[str, RaggedDecodeSizes] = {}
CHIP = {
    "h128": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=128, P=16384, S=64, M=128),
    "h128_page128": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=128, P=8192, S=128, M=64),
    "small_h128": RaggedDecodeSizes(B=8, N=8, K=8, T=1, H=128, P=4096, S=128, M=64),
    "lists_500k": RaggedDecodeSizes(B=8, N=32, K=8, T=1, H=128, P=16384, S=64, M=7813),
    "page16": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=128, P=16384, S=16, M=128),
    "page32": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=128, P=16384, S=32, M=128),
    "chunk_h128": RaggedDecodeSizes(B=1, N=32, K=8, T=512, H=128, P=16384, S=64, M=128),
    "h256": RaggedDecodeSizes(B=8, N=16, K=8, T=1, H=256, P=4096, S=64, M=64),
    "h64": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=64, P=16384, S=64, M=128),
    "h64_page128": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=64, P=8192, S=128, M=64),
    "h80": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=80, P=2048, S=128, M=64),
    "h96": RaggedDecodeSizes(B=32, N=32, K=8, T=1, H=96, P=2048, S=128, M=64),
}
"""Llama-3.1-8B's heads at 8k slots a list, and other head dims."""

TIMED_32K = RaggedDecodeSizes(B=4, N=32, K=8, T=1, H=128, P=4 * 8 * 1024, S=64, M=1024)

SELECTED = 8
"""One page in this many is read by the selections."""

MOST = {64: 1.5, 256: 1.3}
"""Slots of a page to the most a read may take, in times of "dense": of one new token against 8k live slots a
list and more, in bfloat16."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkrs,bksh->bkrh", p, v, preferred_element_type=jnp.float32)


def _tuned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    p = jax.nn.softmax(products.scores(q, k, q.shape[-1] ** -0.5), axis=-1)
    return products.mix(p, v)


def on_cpu(sizes: RaggedDecodeSizes, dtype: str) -> CpuBench:
    """Against the same keys and values contiguously, which no ragged cache can have.

    "dense" reads them in the plain way (einsum, softmax, einsum), "dense, tuned" by the products of
    ``products.py``. int8 is compared with dense float32: four times its bytes.
    """
    rng = np.random.default_rng(0)
    b, n, kv, t, h, pool, slots, m = sizes
    wide = "float32" if dtype == "int8" else dtype
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), wide)
    k, v = (jnp.asarray(rng.normal(size=(pool, slots, h)) * 30, dtype) for _ in range(2))
    scales = jnp.full((pool, 2, h), 1 / 30, jnp.float32) if dtype == "int8" else None
    table = jnp.asarray(rng.permutation(pool)[: b * kv * m].reshape(b, kv, m), jnp.int32)
    length = jnp.full((b, kv), m * slots, jnp.int32)
    some = jnp.asarray(rng.permuted(np.broadcast_to(np.arange(m), (b, kv, m)), axis=2)[..., : m // SELECTED])
    rows = [x[: b * kv * m].reshape(b, kv, m * slots, h).astype(wide) for x in (k, v)]
    contiguous, paged = (q.reshape(b, kv, -1, h), *rows), (q, k, v, table, length)

    def paged_read(**more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(ragged_decode, scales=scales, **more), paged

    runs = {
        "dense": (_dense, contiguous),
        "dense, tuned": (_tuned, contiguous),
        "ragged": paged_read(),
        "with mass": paged_read(mass=True),
        f"1/{SELECTED} of pages": paged_read(pages=some),
    }
    judged = dtype == "bfloat16" and t == 1 and m * slots >= 8192
    return CpuBench(runs, "dense", {"ragged": MOST[slots]} if judged else {})


# Compiled for chips.


def _case(sizes: RaggedDecodeSizes, dtype: str, *, mass: bool = False, pages: int = 0) -> CompiledCase:
    b, n, kv, t, h, pool, slots, m = sizes
    a, width, stored = jax.ShapeDtypeStruct, jnp.dtype(dtype).itemsize, stored_width(h, dtype)
    q = a((b, n, t, h), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    pages_of = a((pool, slots, stored), dtype)
    more: dict[str, Any] = {"scales": a((pool, 2, h), jnp.float32)} if dtype in CODES else {}
    if pages:
        more["pages"], more["slots"] = a((b, kv, pages), jnp.int32), a((b, kv, pages, slots), bool)
    live = b * kv * (pages or m) * slots
    rows = n // kv * t
    out = a((b, n, t, h), jnp.float32)
    mass_bytes = 4 * b * n * m * slots if mass else 0
    # Tiles of mass. GPU: at least 16 rows for G heads, summed over blocks of 64 queries. TPU: whole tiles of
    # 8 rows, in the kernel's order, in the lists' order, and summed.
    gpu = max(16, n // kv) * kv // n * max(1, rows // 64)
    tiles = max(3 * -(-n // kv // 8) * 8 * kv // n, gpu)
    # TPU: pools of short heads and short pages are copied to rows of whole lanes, scales of short heads too.
    in_place, wide = stored % 128 == 0 or slots % 128 == 0, -(-h // 128) * 128
    copies = 0 if in_place else 2 * pool * slots * -(-stored // 128) * 128 * width
    copies += 0 if h % 128 == 0 else 2 * pool * 4 * 128
    _, held = mosaic_tpu.pages_of(rows, pages or m, slots, 2 * slots * stored * width, tuning.Blocks())
    item, together = held * slots, min(rows, mosaic_tpu.ROWS)
    return CompiledCase(
        run=lambda impl: read(impl, mass=mass),
        args=(q, pages_of, pages_of, a((b, kv, m), jnp.int32), a((b, kv), jnp.int32), more),
        moves=2 * live * stored * width
        + (8 * live // slots * h if dtype in CODES else 0)
        + size(q, out)
        + mass_bytes,
        flops=4 * live * h * rows,
        temp=(8 << 20) + 64 * size(q) * wide // h + copies + tiles * mass_bytes,
        whole=pool * slots * stored if in_place else 0,
        step=(2 * item * stored * width, 4 * item * h * together),
        kernel="ragged_decode_read",
        pages=held,
    )


def cases() -> dict[str, CompiledCase]:
    """By dtype, by output, by head dim."""
    base = CHIP["h128"]
    return {
        "bfloat16": _case(base, "bfloat16"),
        "int8": _case(base, "int8"),
        "bfloat16_page128": _case(CHIP["h128_page128"], "bfloat16"),
        "int8_page128": _case(CHIP["h128_page128"], "int8"),
        "float32": _case(CHIP["small_h128"], "float32"),
        "int8_mass": _case(base, "int8", mass=True),
        "bfloat16_selected_mass": _case(base, "bfloat16", mass=True, pages=16),
        "bfloat16_page16": _case(CHIP["page16"], "bfloat16"),
        "int8_page32": _case(CHIP["page32"], "int8"),
        "bfloat16_chunk_mass": _case(CHIP["chunk_h128"], "bfloat16", mass=True),
        "bfloat16_h256": _case(CHIP["h256"], "bfloat16"),
        "bfloat16_h64": _case(CHIP["h64"], "bfloat16"),
        "bfloat16_h64_page128_mass": _case(CHIP["h64_page128"], "bfloat16", mass=True),
        "int8_h96": _case(CHIP["h96"], "int8"),
        "bfloat16_500k": _case(CHIP["lists_500k"], "bfloat16"),
        "int4": _case(CHIP["h128_page128"], "uint8"),
        "int4_mass": _case(CHIP["h128_page128"], "uint8", mass=True),
        "int4_page64": _case(base, "uint8"),
        "int4_h80": _case(CHIP["h80"], "uint8"),
        "int4_h256": _case(CHIP["h256"], "uint8"),
        "bfloat16_h80": _case(CHIP["h80"], "bfloat16"),
    }


def _timing(name: str, sizes: RaggedDecodeSizes, dtype: str, ragged: bool) -> Timing:
    call = timed_call(name, sizes, dtype, ragged)
    if ragged or dtype == "uint8":  # rivals read even lists, and codes that have a number a channel
        return Timing(call)
    q, k, v, table, length, more = call.args
    return Timing(call, rivals.decode(q, k, v, table, length, more["scales"]))


def timings(tiny: bool) -> Iterator[Timing]:
    """Uniform and ragged lists of about as many live slots."""
    for name, sizes in {"tiny": TINY}.items() if tiny else {"32k": TIMED_32K, "8k": TIMED_8K}.items():
        for ragged in (False, True):
            yield _timing(f"{name}_bfloat16{'_ragged' * ragged}", sizes, "bfloat16", ragged)
    if not tiny:
        yield _timing("8k_int8", TIMED_8K, "int8", False)
        yield _timing("8k_int4", TIMED_8K, "uint8", False)


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """80 % of a copy's bandwidth at 32k, and a cost that follows live pages within 10 %."""
    cases, reached = record["cases"], []
    for name, case in cases.items():
        if name.startswith("32k"):
            ratio = case["gb_s"] / limits["copy_gb_s"]
            reached.append(Target(f"{name}: bandwidth of a copy's", ratio, 0.8, True))
        even = cases.get(name.removesuffix("_ragged"))
        if name.endswith("_ragged") and even:
            ratio = even["gb_s"] / case["gb_s"]
            reached.append(Target(f"{name}: cost of a live byte over that of even lists", ratio, 1.1, False))
    return reached


def mosaic_gpu_cases() -> dict[str, CompiledCase]:
    """What the body for Hopper takes, of ``cases``."""
    names = ("bfloat16", "int8", "float32", "int8_mass", "bfloat16_page16", "bfloat16_h64")
    known = cases()
    return {
        name: known[name]._replace(impl="mosaic_gpu", temp=known[name].temp + (16 << 20)) for name in names
    }
