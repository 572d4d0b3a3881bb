"""What is tested, compiled for chips, checked and timed of phi."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.measure.work import Bench, Case, Check, Job, Shapes, Target, size
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract
from pallas_kernels.phi.summary import Summary

DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """log_k [B, K, S, F], v [B, K, S, H], log_q [B, N, T, F]; R tokens of a stream are read exactly."""

    B: int
    N: int
    K: int
    T: int
    S: int
    F: int
    H: int
    R: int


SHAPES = Shapes(
    ("test", "g1_h32", Shape(B=2, N=2, K=2, T=5, S=17, F=8, H=32, R=4)),
    ("test", "g4_h64", Shape(B=1, N=8, K=2, T=3, S=64, F=64, H=64, R=20)),
    ("test", "g8_h96", Shape(B=1, N=8, K=1, T=1, S=31, F=16, H=96, R=1)),
    ("test", "g1_h128", Shape(B=2, N=1, K=1, T=1, S=63, F=128, H=128, R=62)),
    ("test", "g2_h80", Shape(B=1, N=2, K=1, T=2, S=40, F=24, H=80, R=7)),
    ("test", "g1_h256", Shape(B=1, N=1, K=1, T=1, S=33, F=16, H=256, R=5)),
    # One token past two blocks.
    ("blocked", "blocked", Shape(B=1, N=4, K=2, T=2, S=2049, F=16, H=32, R=1030)),
    ("bench", "decode", Shape(B=1, N=16, K=4, T=1, S=32768, F=64, H=64, R=328)),
    ("bench", "llama8b", Shape(B=1, N=32, K=8, T=1, S=32768, F=128, H=128, R=328)),
    ("chip", "h128", Shape(B=1, N=32, K=8, T=1, S=16384, F=128, H=128, R=300)),
    ("chip", "odd_h64", Shape(B=2, N=4, K=2, T=3, S=1000, F=64, H=64, R=33)),
    ("chip", "odd_h96", Shape(B=1, N=8, K=1, T=1, S=513, F=64, H=96, R=1)),
    ("check", "check", Shape(B=2, N=8, K=2, T=3, S=1100, F=64, H=128, R=33)),
    ("tiny", "tiny", Shape(B=1, N=4, K=2, T=2, S=70, F=16, H=32, R=5)),
    ("timed", "timed", Shape(B=4, N=32, K=8, T=1, S=65536, F=128, H=128, R=600)),
)


def _build(impl: str | None) -> Callable[..., Any]:
    def run(log_k: Any, v: Any, there: Any) -> Any:
        return phi_build(log_k, v, there=there, impl=impl)

    return run


def _read(impl: str | None) -> Callable[..., Any]:
    """What a decode step does: all but the tokens it visits, for its queries."""

    def run(summary: Summary, log_k: Any, v: Any, there: Any, log_q: Any) -> Any:
        return phi_evaluate(phi_subtract(summary, log_k, v, there=there, impl=impl), log_q, impl=impl)

    return run


# On this CPU.


def bench(shape: Shape, dtype: str) -> Bench:
    """Against reading the tokens that the summary stands for."""
    rng = np.random.default_rng(0)
    b, n, heads, t, s, f, h, r = shape
    log_k, log_q = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((b, heads, s, f), (b, n, t, f)))
    k, v = (jnp.asarray(rng.normal(size=(b, heads, s, h)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), dtype)
    there = jnp.ones((b, heads, s), bool)
    pos = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    summary = jax.jit(_build(None))(log_k, v, there)
    runs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "read all": (lambda q, k, v, pos: blockwise(q, k, v, q_pos=pos[:, -t:], k_pos=pos), (q, k, v, pos)),
        "build": (_build(None), (log_k, v, there)),
        "subtract+evaluate": (
            _read(None),
            (summary, log_k[:, :, :r], v[:, :, :r], there[:, :, :r], log_q),
        ),
    }
    return Bench(runs, "read all")


# Compiled for chips.

TILE = 512


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
        "build_bfloat16": _case(SHAPES["h128"], "bfloat16"),
        "read_bfloat16": _case(SHAPES["h128"], "bfloat16", read=True),
        "odd_h64_build_float32": _case(SHAPES["odd_h64"], "float32"),
        "odd_h64_read_float32": _case(SHAPES["odd_h64"], "float32", read=True),
        "odd_h96_read_bfloat16": _case(SHAPES["odd_h96"], "bfloat16", read=True),
    }


# On a device.


def _everything(impl: str) -> Callable[..., Any]:
    """A summary, the same without some of its tokens, and what queries read of that."""

    def run(log_k: Any, v: Any, there: Any, few: Any, log_q: Any) -> Any:
        whole = phi_build(log_k, v, there=there, impl=impl)
        rest = phi_subtract(whole, log_k[:, :, : few.shape[2]], v[:, :, : few.shape[2]], there=few, impl=impl)
        return whole, rest, phi_evaluate(rest, log_q, impl=impl)

    return run


def _args(shape: Shape, dtype: str) -> tuple[Any, ...]:
    b, n, kv, t, s, f, h, r = shape
    rng = np.random.default_rng(0)
    log_k, log_q = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((b, kv, s, f), (b, n, t, f)))
    v = jax.random.normal(jax.random.PRNGKey(0), (b, kv, s, h), dtype)
    there = jnp.asarray(rng.random((b, kv, s)) < 0.9)
    return log_k, v, there, there[:, :, :r], log_q


def checks(tiny: bool) -> Iterator[Check]:
    """Both dtypes; sums are float32 whatever values are."""
    base = SHAPES["tiny" if tiny else "check"]
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        # Subtracting cancels: what is left of a sum of S terms keeps that sum's rounding.
        yield Check(dtype, _everything, _args(base, dtype), 4 * base.S, "float32")


def _job(shape: Shape, **more: Any) -> Job:
    args = _args(shape, "bfloat16")[:3]
    flops = 2 * shape.B * shape.K * shape.S * shape.F * shape.H
    return Job(f"build_{shape.S}", _build, args, moves=size(args), flops=flops, **more)


def searches(tiny: bool) -> Iterator[Job]:
    """The sums over tokens."""
    shape = SHAPES["tiny" if tiny else "timed"]
    yield _job(shape, tunes="sums", key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Building over a prompt; what a decode step does."""
    shape = SHAPES["tiny" if tiny else "timed"]
    yield _job(shape)
    log_k, v, there, few, log_q = _args(shape, "bfloat16")
    summary = jax.jit(_build("xla"))(log_k, v, there)
    args = (summary, log_k[:, :, : shape.R], v[:, :, : shape.R], few, log_q)
    yield Job(f"read_{shape.R}", _read, args, moves=size(args))


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """None are set."""
    return []
