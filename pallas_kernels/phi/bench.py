"""``python -m pallas_kernels.phi.bench``: against reading the tokens that the summary stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.phi.api import phi_build, phi_evaluate, phi_subtract
from pallas_kernels.phi.shapes import BENCH, Shape
from pallas_kernels.phi.summary import Summary

REPEATS = 15


def _times(shape: Shape, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    b, n, heads, t, s, f, h, r = shape
    log_k, log_q = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((b, heads, s, f), (b, n, t, f))
    )
    k, v = (jnp.asarray(rng.normal(size=(b, heads, s, h)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(b, n, t, h)), dtype)
    there = jnp.ones((b, heads, s), bool)
    pos = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    summary = jax.jit(lambda a, v, there: phi_build(a, v, there=there))(log_k, v, there)

    def step(summary: Summary, log_k: jax.Array, v: jax.Array, log_q: jax.Array) -> tuple[jax.Array, ...]:
        rest = phi_subtract(summary, log_k, v, there=jnp.ones(v.shape[:3], bool))
        return phi_evaluate(rest, log_q)

    runs: dict[str, Callable[..., Any]] = {
        "read all": lambda q, k, v, pos: blockwise(q, k, v, q_pos=pos[:, -t:], k_pos=pos),
        "build": lambda a, v, there: phi_build(a, v, there=there),
        "subtract+evaluate": step,
    }
    args = {
        "read all": (q, k, v, pos),
        "build": (log_k, v, there),
        "subtract+evaluate": (summary, log_k[:, :, :r], v[:, :, :r], log_q),
    }
    return timing.in_turns(runs, args, REPEATS)


def main() -> None:
    """Print one line a shape and dtype."""
    for name, shape in BENCH.items():
        for dtype in ("float32", "bfloat16"):
            print(timing.report("phi", name, dtype, _times(shape, dtype), "read all"), flush=True)


if __name__ == "__main__":
    main()
