"""Kernels on the device at hand: do they agree with the definition, and how fast are they.

Every timing is of one jitted call repeated until a tenth of a second has passed, medians of five, and
stands beside what the device can do: a copy of as many bytes, a product of matrices, and the
vendor's attention.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, numerics
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.ragged_decode.api import ragged_decode


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """Median time of one call, compiled and warm."""
    compiled = jax.jit(run)
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    times = max(1, int(0.1 / max(time.perf_counter() - start, 1e-6)))
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            out = compiled(*args)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / times)
    return float(np.median(found))


def ceilings() -> dict[str, float]:
    """Measured GB/s of a copy (read and write) and TFLOP/s of a bfloat16 product."""
    x = jnp.ones((1 << 29,), jnp.uint8)
    y = jnp.ones((8192, 8192), jnp.bfloat16)
    copy, product = seconds(lambda x: x ^ 1, x), seconds(lambda y: y @ y, y)
    return {"copy_gb_s": 2 * x.size / copy / 1e9, "matmul_tflop_s": 2 * 8192**3 / product / 1e12}


def _lists(rng: np.random.Generator, rows: int, heads: int, slots: int, m: int, ragged: bool) -> Any:
    """(table, length) of pages in random order; ragged lengths have the same sum."""
    pool = rows * heads * m
    table = rng.permutation(pool).reshape(rows, heads, m)
    length = np.full((rows, heads), m * slots // 2)
    if ragged:
        share = rng.uniform(0, 2, size=length.shape)
        length = np.minimum(length * share, m * slots).astype(int)
    return jnp.asarray(table, jnp.int32), jnp.asarray(length, jnp.int32)


def _pools(key: jax.Array, pages: int, slots: int, h: int, dtype: str) -> tuple[Any, Any, Any]:
    one, two = jax.random.split(key)
    if dtype == "int8":
        draw = [jax.random.randint(x, (pages, slots, h), -127, 128, jnp.int8) for x in (one, two)]
        return draw[0], draw[1], jnp.full((pages, 2, h), 0.01, jnp.float32)
    return (
        jax.random.normal(one, (pages, slots, h), dtype),
        jax.random.normal(two, (pages, slots, h), dtype),
        None,
    )


def decode(impl: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """ragged_decode of ``impl``: agreement at a small size, bandwidth at 8k and 32k live slots a stream."""
    rng, key = np.random.default_rng(0), jax.random.PRNGKey(0)
    for dtype in ("bfloat16", "int8", "float32"):
        q = jax.random.normal(key, (2, 8, 1, 128), "float32" if dtype == "float32" else "bfloat16")
        k, v, scales = _pools(key, 2 * 2 * 16, 64, 128, dtype)
        table, length = _lists(rng, 2, 2, 64, 16, True)
        more: dict[str, Any] = {"scales": scales, "mass": True}
        found = ragged_decode(q, k, v, table, length, impl=impl, **more)
        wanted = ragged_decode(q, k, v, table, length, impl="ref", **more)
        yield f"agrees_{dtype}", agreement(found, wanted, 1024, dtype)
    for name, rows, m, dtype, ragged in (
        ("8k_bfloat16", 16, 256, "bfloat16", False),
        ("8k_bfloat16_ragged", 16, 256, "bfloat16", True),
        ("8k_int8", 16, 256, "int8", False),
        ("32k_bfloat16", 4, 1024, "bfloat16", False),
        ("32k_bfloat16_ragged", 4, 1024, "bfloat16", True),
    ):
        q = jax.random.normal(key, (rows, 32, 1, 128), jnp.bfloat16)
        k, v, scales = _pools(key, rows * 8 * m, 64, 128, dtype)
        table, length = _lists(rng, rows, 8, 64, m, ragged)
        run = lambda *x, impl=impl, scales=scales: ragged_decode(*x, scales=scales, impl=impl)  # noqa: E731
        took = seconds(run, q, k, v, table, length)
        moved = 2 * int(length.sum()) * 128 * k.dtype.itemsize
        yield name, {"ms": took * 1e3, "gb_s": moved / took / 1e9, "live_slots": int(length.sum())}


def prompt(impl: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """blockwise of ``impl``: agreement with gradients, then TFLOP/s beside the vendor's attention."""
    key = jax.random.PRNGKey(0)
    for dtype in ("bfloat16", "float32"):
        q, k, v, pos = _prompt(key, 300, 8, 2, dtype)
        exact = [x.astype(jnp.float32) for x in (q, k, v)]
        both = []
        for arrays, which in (((q, k, v), impl), (exact, "ref")):
            out, back = jax.vjp(functools.partial(_windowed, which, pos), *arrays)
            both.append((*out, *back(jax.tree.map(jnp.ones_like, out))))
        yield f"agrees_{dtype}", agreement(both[0], both[1], 300 * 8, dtype)
    for t in (2048, 8192):
        q, k, v, pos = _prompt(key, t, 32, 8, "bfloat16")
        flops = 2 * 32 * 128 * t * t
        runs: dict[str, Callable[..., Any]] = {
            "forward": functools.partial(_causal, impl, pos),
            "vendor": _vendor,
        }
        for name, run in runs.items():
            for what, times in (("", 1.0), ("_gradient", 3.5)):
                both_ways = jax.grad(lambda *x, run=run: run(*x).astype(jnp.float32).sum(), (0, 1, 2))
                try:
                    took = seconds(both_ways if what else run, q, k, v)
                except (RuntimeError, ValueError, NotImplementedError) as reason:
                    yield f"{name}{what}_{t}", {"error": str(reason).splitlines()[0][:200]}
                    continue
                yield f"{name}{what}_{t}", {"ms": took * 1e3, "tflop_s": times * flops / took / 1e12}


def _windowed(impl: str, pos: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    return blockwise(*qkv, q_pos=pos, k_pos=pos, window=100, impl=impl)


def _causal(impl: str, pos: jax.Array, *qkv: jax.Array) -> jax.Array:
    return blockwise(*qkv, q_pos=pos, k_pos=pos, impl=impl)[0]


def _prompt(key: jax.Array, t: int, n: int, kv: int, dtype: str) -> tuple[Any, ...]:
    q, k, v = (
        jax.random.normal(x, (1, h, t, 128), dtype) for x, h in zip(jax.random.split(key, 3), (n, kv, kv))
    )
    return q, k, v, jnp.arange(t, dtype=jnp.int32)[None]


def _vendor(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's attention where there is one."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    kind: Literal["cudnn", "xla"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind).swapaxes(1, 2)


def agreement(found: Any, wanted: Any, terms: int, dtype: str) -> dict[str, Any]:
    """Errors against the definition in float32, and whether they are within ``numerics``.

    16-bit products round every operand to 8 bits: their error may be 2 ** -8 of the largest value,
    grown as sums of rounding errors grow.
    """
    tolerance = numerics.float32(terms) if dtype == "float32" else 2.0**-8 * (1 + np.log2(terms) / 4)
    errors = []
    for ours, theirs in zip(found, wanted):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
            return {"agrees": False, "why": "infinities differ"}
        finite = np.isfinite(theirs)
        largest = max(1.0, float(np.abs(theirs[finite]).max(initial=0)))
        errors.append(float(np.abs(ours - theirs)[finite].max(initial=0)) / largest)
    return {"agrees": max(errors) <= tolerance, "errors": errors, "tolerance": tolerance}


OPERATIONS: dict[str, Callable[[str], Iterator[tuple[str, dict[str, Any]]]]] = {
    "ragged_decode": decode,
    "blockwise": prompt,
}


def measure(minutes: float) -> None:
    """Print and record everything, starting nothing after ``minutes`` have passed.

    Raises:
      ValueError: there is no GPU or TPU here.
    """
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    if platform not in dispatch.PREFERRED:
        raise ValueError(f"bench --device needs a GPU or TPU; this is {platform}. Use bench --static here.")
    impl, end = dispatch.PREFERRED[platform][0], time.monotonic() + 60 * minutes
    limits = ceilings()
    print(f"{kind}: {json.dumps(limits)}", flush=True)
    for op, cases in OPERATIONS.items():
        found: dict[str, Any] = {"impl": impl, "jax": jax.__version__, "device": kind, **limits, "cases": {}}
        try:
            for name, result in cases(impl):
                found["cases"][name] = result
                print(f"{op:14} {name:24} {json.dumps(result)}", flush=True)
                if time.monotonic() > end:
                    found["cut_short"] = True
                    break
        except (RuntimeError, ValueError) as reason:  # the next operation may still run
            found["error"] = str(reason).splitlines()[0][:300]
            print(f"{op:14} failed: {found['error']}", flush=True)
        checks = [x for name, x in found["cases"].items() if name.startswith("agrees")]
        found["agrees"] = len(checks) > 1 and all(x["agrees"] for x in checks) and "error" not in found
        file = dispatch.TUNED / dispatch.slug(kind) / f"{op}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
