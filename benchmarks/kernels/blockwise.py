"""blockwise and column_mass: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import rivals
from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels.blockwise.api import blockwise, column_mass
from pallas_kernels.blockwise.work import TIMED, TINY, BlockwiseSizes, arrays, positions, timed_call
from pallas_kernels.measure.work import size

DTYPES = ("float32", "bfloat16")

BENCH = {
    "ring": BlockwiseSizes(B=8, N=16, K=4, T=1, S=1024, H=64),
    "full_cache": BlockwiseSizes(B=1, N=10, K=5, T=1, S=8192, H=64),
    "chunk": BlockwiseSizes(B=1, N=4, K=2, T=256, S=2048, H=64),
    "prompt": BlockwiseSizes(B=1, N=4, K=2, T=2048, S=2048, H=64),
    "prompt_8k": BlockwiseSizes(B=1, N=4, K=2, T=8192, S=8192, H=64),
    "late_chunk": BlockwiseSizes(B=1, N=4, K=2, T=512, S=8192, H=64),
}
LARGE: dict[str, BlockwiseSizes] = {}
CHIP = {
    "ring_h128": BlockwiseSizes(B=8, N=32, K=8, T=1, S=1024, H=128),
    "prompt_h128": BlockwiseSizes(B=1, N=32, K=8, T=2048, S=2048, H=128),
    "odd_h64": BlockwiseSizes(B=1, N=8, K=8, T=1000, S=3000, H=64),
    "odd_h80": BlockwiseSizes(B=2, N=8, K=4, T=3, S=700, H=80),
    "h256": BlockwiseSizes(B=1, N=8, K=4, T=2048, S=2048, H=256),
}
"""Llama-3.1-8B's heads, and sizes that divide no block."""

BLOCK = 256
MOST = 1.3
"""The most a prompt may take, in times of the dense one in blocks."""


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where((k_pos[:, None, :] <= q_pos[:, :, None])[:, None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Queries are the last T of S positions."""
    t, s = q.shape[2], k.shape[2]
    parts = []
    for at in range(0, t, BLOCK):
        end = min(at + BLOCK, t)
        queries, seen = slice(at, end), slice(0, s - t + end)
        parts.append(
            _dense(q[:, :, queries], k[:, :, seen], v[:, :, seen], q_pos[:, queries], k_pos[:, seen])
        )
    return jnp.concatenate(parts, axis=3)


def on_cpu(sizes: BlockwiseSizes, dtype: str) -> CpuBench:
    """Against dense attention over the same keys and values.

    "dense" is one einsum, softmax, einsum; "dense in blocks" the same for blocks of queries, each over the
    keys up to its end, which is what a prompt is held against.
    """
    q, k, v = arrays(sizes, dtype)
    k_pos = positions(sizes)
    q_pos = k_pos[:, sizes.S - sizes.T :]
    ones = jnp.ones(q_pos.shape, jnp.float32)
    lse = jax.jit(blockwise)(q, k, v, q_pos=q_pos, k_pos=k_pos)[1]
    runs: dict[str, Callable[..., Any]] = {
        "dense": _dense,
        "dense in blocks": _in_blocks,
        "blockwise": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j),
        "window S/8": lambda q, k, v, i, j: blockwise(q, k, v, q_pos=i, k_pos=j, window=sizes.S // 8),
        "column_mass": lambda q, k, v, i, j: column_mass(q, k, lse, ones, q_pos=i, k_pos=j),
    }
    if sizes.N * sizes.T * sizes.S > 1 << 26:
        del runs["dense"]  # a quarter of a gigabyte of scores, and as much again
    base, most = ("dense in blocks", {"blockwise": MOST}) if sizes.T > BLOCK else ("dense", {})
    args = (q, k, v, q_pos, k_pos)
    return CpuBench({name: (run, args) for name, run in runs.items()}, base, most)


# Compiled for chips.

CASE_WINDOW = 256
TILE = 512


def _forward(impl: str, window: int | None) -> Callable[..., Any]:
    """Out comes in the keys' dtype."""

    def run(q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return blockwise(q, k, v, dtype=k.dtype, **options)

    return run


def _gradients(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, *where: Any) -> Any:
        loss = lambda *x: _forward(impl, window)(*x, *where)[0].sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return run


def _mass(impl: str, window: int | None) -> Callable[..., Any]:
    def run(q: Any, k: Any, lse: Any, weights: Any, q_pos: Any, k_pos: Any, admit: Any) -> Any:
        options = {"q_pos": q_pos, "k_pos": k_pos, "admit": admit, "window": window, "impl": impl}
        return column_mass(q, k, lse, weights, **options)

    return run


def _case(
    sizes: BlockwiseSizes, dtype: str, what: str = "forward", *, admitted: bool = False
) -> CompiledCase:
    b, n, kv, t, s, h = sizes
    a, window = jax.ShapeDtypeStruct, CASE_WINDOW if admitted else None
    q, k = a((b, n, t, h), dtype), a((b, kv, s, h), dtype)
    where = (a((b, t), jnp.int32), a((b, s), jnp.int32), a((b, kv, s), bool) if admitted else None)
    pairs = b * n * (t * (s - t) + t * t // 2)
    mass = (q, k, a((b, n, t), jnp.float32), a((b, t), jnp.float32), *where)
    run, args, products = {
        "forward": (_forward, (q, k, k, *where), 2),
        "gradient": (_gradients, (q, k, k, *where), 2 + 8),
        "mass": (_mass, mass, 1),
    }[what]
    rows, keys = min(TILE, n // kv * t), min(TILE, s)
    # Padded to whole blocks and lanes: a float32 array of all queries and one of all keys.
    queries = 4 * b * kv * -(-n // kv * t // rows) * rows * max(h, 128)
    wide = queries + 4 * b * kv * -(-s // keys) * keys * max(h, 128)
    return CompiledCase(
        run=lambda impl: run(impl, window),
        args=args,
        moves=size(args) + q.dtype.itemsize * b * n * t * h,
        flops=2 * products * pairs * h,
        # Backward also holds the output again and its gradient as it came, both before padding.
        temp=(8 << 20) + (4 * wide + 2 * queries if what == "gradient" else 2 * wide),
        whole=b * kv * s * h if h % 128 == 0 and s % TILE == 0 and what == "forward" else 0,
        step=(2 * keys * h * jnp.dtype(dtype).itemsize, 4 * rows * keys * h),
        kernel="column_mass" if what == "mass" else "blockwise",
    )


def cases() -> dict[str, CompiledCase]:
    """Reading a ring, a prompt, its gradient, its column mass; other dtypes and head dims."""
    prompt = CHIP["prompt_h128"]
    return {
        "ring_bfloat16": _case(CHIP["ring_h128"], "bfloat16"),
        "prompt_bfloat16": _case(prompt, "bfloat16"),
        "prompt_bfloat16_admitted": _case(prompt, "bfloat16", admitted=True),
        "prompt_bfloat16_gradient": _case(prompt, "bfloat16", "gradient"),
        "prompt_bfloat16_admitted_gradient": _case(prompt, "bfloat16", "gradient", admitted=True),
        "prompt_bfloat16_mass": _case(prompt, "bfloat16", "mass", admitted=True),
        "odd_float32_gradient": _case(CHIP["odd_h64"], "float32", "gradient"),
        "odd_bfloat16_mass": _case(CHIP["odd_h80"], "bfloat16", "mass"),
        "h256_bfloat16_gradient": _case(CHIP["h256"], "bfloat16", "gradient"),
    }


def timings(tiny: bool) -> Iterator[Timing]:
    """Prompts, forward and with gradients."""
    base = TINY if tiny else TIMED
    for t in (base.T,) if tiny else (8192, 2048):
        for gradient in (False, True):
            call = timed_call(base._replace(T=t, S=t), gradient)
            yield Timing(call, rivals.prompt(*call.args[:3], gradient=gradient))


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """60 % of cuDNN's speed forward."""
    reached = []
    for name, case in record["cases"].items():
        theirs = record["compared"].get(f"{name}/cudnn", {})
        if name.startswith("forward") and "ms" in theirs:
            reached.append(Target(f"{name}: speed of cuDNN's", theirs["ms"] / case["ms"], 0.6, True))
    return reached


def mosaic_gpu_cases() -> dict[str, CompiledCase]:
    """What the body for Hopper takes, of ``cases``, and a prompt of small heads."""
    known, small = cases(), CHIP["prompt_h128"]._replace(H=64)
    chosen = {name: known[name] for name in ("ring_bfloat16", "prompt_bfloat16", "prompt_bfloat16_admitted")}
    chosen["prompt_bfloat16_h64"] = _case(small, "bfloat16")
    return {name: case._replace(impl="mosaic_gpu") for name, case in chosen.items()}
