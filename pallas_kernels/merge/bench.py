"""``python -m pallas_kernels.merge.bench``: merging against copying the same bytes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import timing
from pallas_kernels.merge.api import merge
from pallas_kernels.merge.shapes import BENCH


def main() -> None:
    """Print one line a shape."""
    rng = np.random.default_rng(0)
    for name, shape in BENCH.items():
        size = (shape.B, shape.N, shape.T, shape.H)
        parts = [
            (
                jnp.asarray(rng.normal(size=size), jnp.float32),
                jnp.asarray(rng.normal(size=size[:3]), jnp.float32),
            )
            for _ in range(shape.parts)
        ]
        runs = {"sum of outs": lambda p: sum(out for out, _ in p), "merge": lambda p: merge(p)}
        times = timing.in_turns(runs, dict.fromkeys(runs, (parts,)), 50)
        print(timing.report("merge", name, "float32", times, "sum of outs"))


if __name__ == "__main__":
    main()
