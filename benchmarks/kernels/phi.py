"""phi: CPU benchmark, cases compiled for chips, timings on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.operations import CompiledCase, CpuBench, Target, Timing
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.measure.work import TimedCall, size
from pallas_kernels.phi.api import Summary, phi_evaluate, phi_subtract
from pallas_kernels.phi.work import TIMED, TINY, PhiSizes, arrays, build, build_call

DTYPES = ("float32", "bfloat16")

BENCH = {
    "decode": PhiSizes(B=1, N=16, K=4, T=1, S=32768, F=64, H=64, R=328),
    "llama8b": PhiSizes(B=1, N=32, K=8, T=1, S=32768, F=128, H=128, R=328),
}
LARGE: dict[str, PhiSizes] = {}
CHIP = {
    "h128": PhiSizes(B=1, N=32, K=8, T=1, S=16384, F=128, H=128, R=300),
    "odd_h64": PhiSizes(B=2, N=4, K=2, T=3, S=1000, F=64, H=64, R=33),
    "odd_h96": PhiSizes(B=1, N=8, K=1, T=1, S=513, F=64, H=96, R=1),
}


def _read(impl: str | None) -> Callable[..., Any]:
    """What a decode step does: all but the tokens it visits, for its queries."""

    def run(summary: Summary, log_k: Any, v: Any, there: Any, log_q: Any) -> Any:
        return phi_evaluate(phi_subtract(summary, log_k, v, there=there, impl=impl), log_q, impl=impl)

    return run


def on_cpu(sizes: PhiSizes, dtype: str) -> CpuBench:
    """Against reading the tokens that the summary stands for."""
    rng = np.random.default_rng(0)
    b, n, heads, t, s, f, h, r = sizes
    log_k, log_q = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((b, heads, s, f), (b, n, t, f)))
    k, v = (jnp.asarray(rng.normal(size=(b, heads, s, h)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), dtype)
    there = jnp.ones((b, heads, s), bool)
    pos = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    summary = jax.jit(build(None))(log_k, v, there)
    runs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "read all": (lambda q, k, v, pos: blockwise(q, k, v, q_pos=pos[:, -t:], k_pos=pos), (q, k, v, pos)),
        "build": (build(None), (log_k, v, there)),
        "subtract+evaluate": (
            _read(None),
            (summary, log_k[:, :, :r], v[:, :, :r], there[:, :, :r], log_q),
        ),
    }
    return CpuBench(runs, "read all")


# Compiled for chips.

TILE = 512


def _case(sizes: PhiSizes, dtype: str, *, read: bool = False) -> CompiledCase:
    b, n, kv, t, s, f, h, r = sizes
    a, tokens = jax.ShapeDtypeStruct, r if read else s
    shapes = (
        a((b, kv, tokens, f), jnp.float32),
        a((b, kv, tokens, h), dtype),
        a((b, kv, tokens), bool),
    )
    row: Any = a((b, kv, f), jnp.float32)
    values: Any = a((b, kv, f, h), jnp.float32)
    summary = Summary(row, row, values)
    args = (summary, *shapes, a((b, n, t, f), jnp.float32)) if read else shapes
    out = a((b, n, t, h), jnp.float32) if read else summary
    tile, width = min(TILE, tokens), jnp.dtype(dtype).itemsize
    # GPU: partial sums of every 1024 tokens; elsewhere padded copies of odd sizes.
    parts = (1 + tokens // 1024) * b * kv * 4 * 128 * -(-h // 128) * 128
    return CompiledCase(
        run=_read if read else build,
        args=args,
        moves=size(args, out),
        flops=2 * b * (kv * tokens + n * t * read) * f * h,
        temp=(8 << 20) + 4 * parts + (0 if h % 128 == 0 and not read else 4 * size(shapes)),
        whole=b * kv * s * f if f % 128 == 0 and s % 1024 == 0 and not read else 0,
        step=(tile * (4 * f + width * h), 2 * tile * f * h),
        kernel="phi_sums",
    )


def cases() -> dict[str, CompiledCase]:
    """Building over a prompt, what a decode step does, odd sizes."""
    return {
        "build_bfloat16": _case(CHIP["h128"], "bfloat16"),
        "read_bfloat16": _case(CHIP["h128"], "bfloat16", read=True),
        "odd_h64_build_float32": _case(CHIP["odd_h64"], "float32"),
        "odd_h64_read_float32": _case(CHIP["odd_h64"], "float32", read=True),
        "odd_h96_read_bfloat16": _case(CHIP["odd_h96"], "bfloat16", read=True),
    }


def timings(tiny: bool) -> Iterator[Timing]:
    """Building over a prompt; what a decode step does."""
    sizes = TINY if tiny else TIMED
    yield Timing(build_call(sizes))
    log_k, v, there, few, log_q = arrays(sizes, "bfloat16")
    summary = jax.jit(build("xla"))(log_k, v, there)
    args = (summary, log_k[:, :, : sizes.R], v[:, :, : sizes.R], few, log_q)
    yield Timing(TimedCall(f"read_{sizes.R}", _read, args, moves=size(args)))


def targets(record: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """None are set."""
    return []
