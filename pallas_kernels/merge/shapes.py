"""Named shapes of merge, for tests and benchmarks alike."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """``parts`` partials of out [B, N, T, H]."""

    B: int
    N: int
    T: int
    H: int
    parts: int


TEST = {
    "decode": Shape(B=2, N=8, T=1, H=64, parts=3),
    "odd": Shape(B=1, N=3, T=5, H=80, parts=2),
}
BENCH = {
    "decode": Shape(B=8, N=32, T=1, H=64, parts=3),
    "chunk": Shape(B=1, N=16, T=512, H=64, parts=2),
}
