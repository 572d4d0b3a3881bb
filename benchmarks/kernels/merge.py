"""merge: CPU benchmark. It has no body of its own to compile or to run on a device."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.operations import CpuBench
from pallas_kernels.merge.api import merge

DTYPES = ("float32",)


class MergeSizes(NamedTuple):
    """``parts`` partials of out [B, N, T, H]."""

    B: int
    N: int
    T: int
    H: int
    parts: int


BENCH = {
    "decode": MergeSizes(B=8, N=32, T=1, H=64, parts=3),
    "chunk": MergeSizes(B=1, N=16, T=512, H=64, parts=2),
}
LARGE: dict[str, MergeSizes] = {}


def on_cpu(sizes: MergeSizes, dtype: str) -> CpuBench:
    """Merging against adding up the same bytes."""
    rng = np.random.default_rng(0)
    shape = (sizes.B, sizes.N, sizes.T, sizes.H)
    parts = [
        tuple(jnp.asarray(rng.normal(size=x), dtype) for x in (shape, shape[:3])) for _ in range(sizes.parts)
    ]
    runs = {"sum of outs": lambda p: sum(out for out, _ in p), "merge": lambda p: merge(p)}
    return CpuBench({name: (run, (parts,)) for name, run in runs.items()}, "sum of outs", repeats=50)
