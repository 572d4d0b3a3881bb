"""phi on a device: agreement, and the bandwidth of building and reading a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import size
from pallas_kernels.device.work import Check, Job, Target
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract
from pallas_kernels.phi.shapes import Shape

CHECK = Shape(B=2, N=8, K=2, T=3, S=1100, F=64, H=128, R=33)
TINY = Shape(B=1, N=4, K=2, T=2, S=70, F=16, H=32, R=5)
TIMED = Shape(B=4, N=32, K=8, T=1, S=65536, F=128, H=128, R=600)


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
    base = TINY if tiny else CHECK
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        # Subtracting cancels: what is left of a sum of S terms keeps that sum's rounding.
        yield Check(dtype, _everything, _args(base, dtype), 4 * base.S, "float32")


def _build(impl: str) -> Callable[..., Any]:
    return lambda log_k, v, there: phi_build(log_k, v, there=there, impl=impl)


def _read(impl: str) -> Callable[..., Any]:
    def run(summary: Any, log_k: Any, v: Any, few: Any, log_q: Any) -> Any:
        return phi_evaluate(phi_subtract(summary, log_k, v, there=few, impl=impl), log_q, impl=impl)

    return run


def _job(shape: Shape, **more: Any) -> Job:
    log_k, v, there, *_ = _args(shape, "bfloat16")
    args = (log_k, v, there)
    flops = 2 * shape.B * shape.K * shape.S * shape.F * shape.H
    return Job(f"build_{shape.S}", _build, args, moves=size(args), flops=flops, **more)


def searches(tiny: bool) -> Iterator[Job]:
    """The sums over tokens."""
    shape = TINY if tiny else TIMED
    yield _job(shape, tunes="sums", key=("bfloat16", shape.H))


def jobs(tiny: bool) -> Iterator[Job]:
    """Building over a prompt; what a decode step does."""
    shape = TINY if tiny else TIMED
    yield _job(shape)
    log_k, v, there, few, log_q = _args(shape, "bfloat16")
    summary = jax.jit(_build("xla"))(log_k, v, there)
    args = (summary, log_k[:, :, : shape.R], v[:, :, : shape.R], few, log_q)
    yield Job(f"read_{shape.R}", _read, args, moves=size(args))


def targets(found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
    """None are set."""
    return []
