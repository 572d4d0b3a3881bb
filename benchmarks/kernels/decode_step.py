"""decode_step: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels.decode_step.api import Cache
from pallas_kernels.decode_step.work import (
    STEPS,
    TIMED_ONE_ROW,
    TINY,
    DecodeStepSizes,
    full_lists,
    step,
    steps,
    timed_call,
)
from pallas_kernels.measure.work import size

DTYPES = ("float32", "bfloat16")

BENCH = {
    "one_row": DecodeStepSizes(B=1, N=10, K=5, H=64, W=64, P=640, S=64, M=128),
    "rows_8k": DecodeStepSizes(B=4, N=16, K=4, H=64, W=64, P=2048, S=64, M=128),
}
LARGE: dict[str, DecodeStepSizes] = {}
CHIP = {
    "one_8k": DecodeStepSizes(B=1, N=32, K=8, H=128, W=256, P=1024, S=64, M=128),
    "8k": DecodeStepSizes(B=8, N=32, K=8, H=128, W=256, P=8192, S=64, M=128),
    "128k": DecodeStepSizes(B=8, N=32, K=8, H=128, W=256, P=16384, S=64, M=2048),
    "short_ring": DecodeStepSizes(B=8, N=32, K=8, H=128, W=32, P=8192, S=64, M=128),
    "h256": DecodeStepSizes(B=8, N=16, K=8, H=256, W=1024, P=4096, S=64, M=64),
}
"""Llama-3.1-8B's heads, and others."""

TIMED_8K = DecodeStepSizes(B=8, N=32, K=8, H=128, W=256, P=8192, S=64, M=128)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, at: jax.Array) -> Any:
    """The step of a dense cache [B, K, C, H]: a slot is written, all are read."""

    def one(_: Any, carry: Any) -> Any:
        keys, values, out = carry
        keys, values = (
            jax.lax.dynamic_update_slice(x, new[:, :, None], (0, 0, at, 0))
            for x, new in ((keys, k), (values, v))
        )
        x = (q + 0 * out).reshape(*k.shape[:2], -1, k.shape[2])
        s = jnp.einsum("bkrh,bksh->bkrs", x, keys, preferred_element_type=jnp.float32) * k.shape[2] ** -0.5
        p = jax.nn.softmax(s, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkrs,bksh->bkrh", p, values, preferred_element_type=jnp.float32)
        return keys, values, out.reshape(q.shape).astype(q.dtype)

    return jax.lax.fori_loop(0, STEPS, one, (*cache, jnp.zeros_like(q)))[2]


def on_cpu(sizes: DecodeStepSizes, dtype: str) -> CpuBench:
    """Beside a plain cache without pages; ``STEPS`` steps a line."""
    args = full_lists(sizes, dtype)
    keys, values = (
        jnp.zeros((sizes.B, sizes.K, sizes.M * sizes.S + sizes.W, sizes.H), dtype) + x[0, 0, 0]
        for x in args[3][:2]
    )
    dense = *args[:3], (keys, values), jnp.int32(7)
    return CpuBench({"dense": (_dense, dense), "decode_step": (steps(None), args)}, "dense", repeats=5)


# Compiled for chips.

ITEM = 1024
"""Slots of an item of the TPU body."""

PARTS = 128
"""Partials of a KV head at most, on a GPU."""


def _shapes(sizes: DecodeStepSizes, dtype: str) -> tuple[Any, ...]:
    def of(*dims: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    b, n, heads, h, window, pool, slots, m = sizes
    cache = Cache(*[of(b, heads, window, h)] * 2, *[of(pool, slots, h)] * 2)
    lists = of(b, heads, m, dtype="int32"), of(b, heads, dtype="int32"), of(b, dtype="int32")
    return of(b, n, h), of(b, heads, h), of(b, heads, h), cache, *lists, of(b, heads, dtype="bool")


def _case(sizes: DecodeStepSizes, dtype: str) -> CompiledCase:
    args, g = _shapes(sizes, dtype), sizes.N // sizes.K
    width, item = jnp.dtype(dtype).itemsize, min(ITEM, sizes.W + sizes.M * sizes.S)
    return CompiledCase(
        run=step,
        args=args,
        moves=2 * sizes.slots * sizes.H * width + 2 * size(args[0]),
        flops=4 * sizes.slots * sizes.H * g,
        temp=(8 << 20) + 4 * sizes.B * sizes.N * PARTS * (sizes.H + 2),
        whole=args[3].ring_k.size,
        step=(2 * item * sizes.H * width, 4 * item * sizes.H * g),
        kernel="decode_step",
        donated=(3,),
    )


def cases() -> dict[str, CompiledCase]:
    """By rows and slots of a list, by head dim."""
    return {f"bfloat16_{name}": _case(sizes, "bfloat16") for name, sizes in CHIP.items()}


def timings(tiny: bool) -> Iterator[Timing]:
    """``STEPS`` steps of one row, and of eight."""
    timed = {"tiny": TINY} if tiny else {"timed_8k": TIMED_8K, "timed_one_8k": TIMED_ONE_ROW}
    for name, sizes in timed.items():
        yield Timing(timed_call(name, sizes))


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """80 % of a copy's bandwidth for eight rows."""
    case = record["cases"].get("timed_8k")
    if case is None:
        return []
    return [Target("8k: bandwidth of a copy's", case["gb_s"] / limits["copy_gb_s"], 0.8, True)]
