"""``python -m pallas_kernels.vertical_slash.bench``: against full attention and a mask alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.blockwise.api import blockwise
from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.shapes import BENCH, Shape

REPEATS = 5
ADMITTED = (0.05, 0.25)


def _times(shape: Shape, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(shape.B, shape.N, shape.T, shape.H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(shape.B, shape.K, shape.T, shape.H)), dtype) for _ in range(2))
    pos = jnp.broadcast_to(jnp.arange(shape.T, dtype=jnp.int32), (shape.B, shape.T))
    draw = rng.random((shape.B, shape.K, shape.T))
    w, shares = shape.window, {f"{share:.0%} admitted": draw < share for share in ADMITTED}

    def full(q: jax.Array, k: jax.Array, v: jax.Array, pos: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(q, k, v, q_pos=pos, k_pos=pos)

    def masked(*x: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise(*x[:3], q_pos=x[3], k_pos=x[3], window=w, admit=x[4])

    def sparse(*x: jax.Array) -> tuple[jax.Array, ...]:
        return vertical_slash(*x, window=w)

    runs: dict[str, Callable[..., Any]] = {
        "full": full,
        "blockwise, same mask": masked,
        **dict.fromkeys(shares, sparse),
    }
    args = {
        "full": (q, k, v, pos),
        "blockwise, same mask": (q, k, v, pos, jnp.asarray(draw < ADMITTED[-1])),
        **{name: (q, k, v, jnp.asarray(admit)) for name, admit in shares.items()},
    }
    return timing.in_turns(runs, args, REPEATS)


def main() -> None:
    """Print one line a shape and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["prompt_8k"], help=f"of {', '.join(BENCH)}")
    for name in parser.parse_args().shapes:
        for dtype in ("float32", "bfloat16"):
            print(
                timing.report("vertical_slash", name, dtype, _times(BENCH[name], dtype), "full"), flush=True
            )


if __name__ == "__main__":
    main()
