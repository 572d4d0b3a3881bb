"""What is tested and timed of merge. It has no body of its own to compile or to run on a device."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure.work import Bench, Shapes
from pallas_kernels.merge.api import merge

DTYPES = ("float32",)


class Shape(NamedTuple):
    """``parts`` partials of out [B, N, T, H]."""

    B: int
    N: int
    T: int
    H: int
    parts: int


SHAPES = Shapes(
    ("test", "decode_small", Shape(B=2, N=8, T=1, H=64, parts=3)),
    ("test", "odd", Shape(B=1, N=3, T=5, H=80, parts=2)),
    ("bench", "decode", Shape(B=8, N=32, T=1, H=64, parts=3)),
    ("bench", "chunk", Shape(B=1, N=16, T=512, H=64, parts=2)),
)


def bench(shape: Shape, dtype: str) -> Bench:
    """Merging against adding up the same bytes."""
    rng = np.random.default_rng(0)
    size = (shape.B, shape.N, shape.T, shape.H)
    parts = [
        tuple(jnp.asarray(rng.normal(size=x), dtype) for x in (size, size[:3])) for _ in range(shape.parts)
    ]
    runs = {"sum of outs": lambda p: sum(out for out, _ in p), "merge": lambda p: merge(p)}
    return Bench({name: (run, (parts,)) for name, run in runs.items()}, "sum of outs", repeats=50)
