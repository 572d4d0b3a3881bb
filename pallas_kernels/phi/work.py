"""Checks of phi on a device, and the call that chooses its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure.work import Check, TimedCall, size
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract


class PhiSizes(NamedTuple):
    """log_k [B, K, S, F], v [B, K, S, H], log_q [B, N, T, F]; R tokens of a KV head are read exactly."""

    B: int
    N: int
    K: int
    T: int
    S: int
    F: int
    H: int
    R: int


CHECKED = PhiSizes(B=2, N=8, K=2, T=3, S=1100, F=64, H=128, R=33)
TINY = PhiSizes(B=1, N=4, K=2, T=2, S=70, F=16, H=32, R=5)
TIMED = PhiSizes(B=4, N=32, K=8, T=1, S=65536, F=128, H=128, R=600)


def build(impl: str | None) -> Callable[..., Any]:
    """The summary of all tokens."""

    def run(log_k: Any, v: Any, there: Any) -> Any:
        return phi_build(log_k, v, there=there, impl=impl)

    return run


def arrays(sizes: PhiSizes, dtype: str) -> tuple[Any, ...]:
    """log_k, v, which tokens are there, the first R of those, log_q."""
    b, n, kv, t, s, f, h, r = sizes
    rng = np.random.default_rng(0)
    log_k, log_q = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((b, kv, s, f), (b, n, t, f)))
    v = jax.random.normal(jax.random.PRNGKey(0), (b, kv, s, h), dtype)
    there = jnp.asarray(rng.random((b, kv, s)) < 0.9)
    return log_k, v, there, there[:, :, :r], log_q


def _everything(impl: str) -> Callable[..., Any]:
    """A summary, the same without some of its tokens, and what queries read of that."""

    def run(log_k: Any, v: Any, there: Any, few: Any, log_q: Any) -> Any:
        whole = phi_build(log_k, v, there=there, impl=impl)
        rest = phi_subtract(whole, log_k[:, :, : few.shape[2]], v[:, :, : few.shape[2]], there=few, impl=impl)
        return whole, rest, phi_evaluate(rest, log_q, impl=impl)

    return run


def checks(tiny: bool) -> Iterator[Check]:
    """Both dtypes; sums are float32 whatever values are."""
    base = TINY if tiny else CHECKED
    for dtype in ("bfloat16",) if tiny else ("bfloat16", "float32"):
        # Subtracting cancels: what is left of a sum of S terms keeps that sum's rounding.
        yield Check(dtype, _everything, arrays(base, dtype), 4 * base.S, "float32")


def build_call(sizes: PhiSizes, **more: Any) -> TimedCall:
    """Building over a prompt."""
    args = arrays(sizes, "bfloat16")[:3]
    flops = 2 * sizes.B * sizes.K * sizes.S * sizes.F * sizes.H
    return TimedCall(f"build_{sizes.S}", build, args, moves=size(args), flops=flops, **more)


def searches(tiny: bool) -> Iterator[TimedCall]:
    """The sums over tokens."""
    sizes = TINY if tiny else TIMED
    yield build_call(sizes, tunes="sums", key=("bfloat16", sizes.H))
