"""``python -m pallas_kernels.gated.bench``: with its gradient, against a dense softmax."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.gated.api import gated
from pallas_kernels.gated.shapes import BENCH, Shape

REPEATS = 7


def _dense(window: int, q: jax.Array, k: jax.Array, v: jax.Array, log_gate: jax.Array) -> jax.Array:
    b, n, t, h = q.shape
    q = q.reshape(b, k.shape[1], -1, t, h)
    age = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
    s = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    s = jnp.where(age < 0, -jnp.inf, s + jnp.where(age < window, 0, log_gate[:, :, None, None, :]))
    p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", p, v, preferred_element_type=jnp.float32)


def _gradient(run: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def total(*x: jax.Array) -> jax.Array:
        return run(*x).sum()

    return jax.grad(total, argnums=(0, 1, 2, 3))


def _times(shape: Shape, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(shape.B, shape.N, shape.T, shape.H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(shape.B, shape.K, shape.T, shape.H)), dtype) for _ in range(2))
    log_gate = jnp.asarray(np.log(rng.random((shape.B, shape.K, shape.T))), jnp.float32)
    dense = functools.partial(_dense, shape.window)

    def ours(*x: jax.Array) -> jax.Array:
        return gated(*x, window=shape.window)[0]

    runs: dict[str, Callable[..., Any]] = {
        "dense": dense,
        "gated": ours,
        "dense gradient": _gradient(dense),
        "gated gradient": _gradient(ours),
    }
    return timing.in_turns(runs, dict.fromkeys(runs, (q, k, v, log_gate)), REPEATS)


def main() -> None:
    """Print one line a shape and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["small_512", "small_2k"], help=f"of {', '.join(BENCH)}")
    for name in parser.parse_args().shapes:
        for dtype in ("float32", "bfloat16"):
            print(timing.report("gated", name, dtype, _times(BENCH[name], dtype), "dense"), flush=True)


if __name__ == "__main__":
    main()
