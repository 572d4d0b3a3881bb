"""Named shapes of blockwise and column_mass, for tests and benchmarks alike."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """q [B, N, T, H] against k, v [B, K, S, H]."""

    B: int
    N: int
    K: int
    T: int
    S: int
    H: int


TEST = {
    "g1_h32": Shape(B=2, N=2, K=2, T=5, S=17, H=32),
    "g4_h64": Shape(B=1, N=8, K=2, T=33, S=64, H=64),
    "g8_h80": Shape(B=1, N=8, K=1, T=3, S=31, H=80),
    "g4_h96": Shape(B=2, N=4, K=1, T=1, S=65, H=96),
    "g1_h128": Shape(B=1, N=2, K=2, T=1, S=63, H=128),
    "g2_h256": Shape(B=1, N=2, K=1, T=2, S=33, H=256),
}
# One past a block on both axes, so that the last block of each is all padding but one.
BLOCKED = Shape(B=2, N=4, K=2, T=257, S=513, H=32)
BENCH = {
    "ring": Shape(B=8, N=16, K=4, T=1, S=1024, H=64),
    "full_cache": Shape(B=1, N=10, K=5, T=1, S=8192, H=64),
    "chunk": Shape(B=1, N=4, K=2, T=256, S=2048, H=64),
    "prompt": Shape(B=1, N=4, K=2, T=2048, S=2048, H=64),
    "prompt_8k": Shape(B=1, N=4, K=2, T=8192, S=8192, H=64),
    "late_chunk": Shape(B=1, N=4, K=2, T=512, S=8192, H=64),
}
CHIP = {
    "ring": Shape(B=8, N=32, K=8, T=1, S=1024, H=128),
    "prompt": Shape(B=1, N=32, K=8, T=2048, S=2048, H=128),
    "odd_h64": Shape(B=1, N=8, K=8, T=1000, S=3000, H=64),
    "odd_h80": Shape(B=2, N=8, K=4, T=3, S=700, H=80),
    "h256": Shape(B=1, N=8, K=4, T=2048, S=2048, H=256),
}
"""Compiled ahead of time for chips: Llama-3.1-8B's heads, and sizes that divide no block."""
