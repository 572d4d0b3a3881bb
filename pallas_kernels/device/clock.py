"""Times and ceilings of the device at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 5


def median(call: Callable[[], Any], wait: Callable[[Any], Any], spend: float) -> float:
    """Median seconds of one ``call`` over five rounds, each of as many calls as fit a fifth of ``spend``.

    Args:
      call: starts the work; compiled and warm.
      wait: returns when the work that a call started is done.
      spend: seconds in all, about; 0 for one call.
    """

    def lap(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            out = call()
        wait(out)
        return (time.perf_counter() - start) / times

    first = lap(1)
    times = int(spend / ROUNDS / max(first, 1e-6))
    return float(np.median([lap(times) for _ in range(ROUNDS)])) if times else first


def seconds(run: Callable[..., Any], *args: Any, spend: float = 0.5) -> float:
    """Median time of one call of ``jax.jit(run)``, compiled and warm."""
    compiled = jax.jit(run)
    jax.block_until_ready(compiled(*args))
    return median(lambda: compiled(*args), jax.block_until_ready, spend)


def ceilings(tiny: bool) -> dict[str, float]:
    """Measured GB/s of a copy (read and write) and TFLOP/s of a bfloat16 product, of random numbers."""
    n = 256 if tiny else 8192
    x = jnp.ones((1 << (16 if tiny else 29),), jnp.uint8)
    y = jax.random.normal(jax.random.PRNGKey(0), (n, n), jnp.bfloat16)
    spend = 0.0 if tiny else 0.5
    copy, product = seconds(lambda x: x ^ 1, x, spend=spend), seconds(lambda y: y @ y, y, spend=spend)
    return {"copy_gb_s": 2 * x.size / copy / 1e9, "matmul_tflop_s": 2 * n**3 / product / 1e12}
