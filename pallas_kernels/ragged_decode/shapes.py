"""Named shapes of ragged_decode, for tests and benchmarks alike."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """q [B, N, T, H] against pools [P, S, H] through table [B, K, M]."""

    B: int
    N: int
    K: int
    T: int
    H: int
    P: int
    S: int
    M: int


TEST = {
    "g1_h32": Shape(B=3, N=2, K=2, T=1, H=32, P=40, S=8, M=5),
    "g4_h64": Shape(B=3, N=8, K=2, T=2, H=64, P=70, S=16, M=4),
    "g8_h80": Shape(B=3, N=16, K=2, T=1, H=80, P=24, S=8, M=3),
    "g4_h96": Shape(B=3, N=8, K=2, T=1, H=96, P=24, S=8, M=3),
    "g1_h128": Shape(B=3, N=2, K=2, T=3, H=128, P=130, S=4, M=6),
    "g1_h256": Shape(B=3, N=2, K=2, T=1, H=256, P=20, S=8, M=3),
    "chunk": Shape(B=3, N=8, K=2, T=40, H=32, P=150, S=8, M=12),
    "page128": Shape(B=3, N=8, K=2, T=1, H=64, P=14, S=128, M=3),
}
BENCH = {
    "one_row": Shape(B=1, N=10, K=5, T=1, H=64, P=640, S=64, M=128),
    "one_row_p256": Shape(B=1, N=10, K=5, T=1, H=64, P=160, S=256, M=32),
    "rows_8k": Shape(B=4, N=16, K=4, T=1, H=64, P=2048, S=64, M=128),
    "rows_8k_p256": Shape(B=4, N=16, K=4, T=1, H=64, P=512, S=256, M=32),
    "one_row_32k": Shape(B=1, N=10, K=5, T=1, H=64, P=2560, S=64, M=512),
    "batch": Shape(B=8, N=32, K=8, T=1, H=64, P=2048, S=64, M=32),
    "chunk": Shape(B=1, N=4, K=2, T=256, H=64, P=64, S=64, M=32),
}
CHIP = {
    "h128": Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=64, M=128),
    "small_h128": Shape(B=8, N=8, K=8, T=1, H=128, P=4096, S=128, M=64),
    "page16": Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=16, M=128),
    "page32": Shape(B=32, N=32, K=8, T=1, H=128, P=16384, S=32, M=128),
    "chunk": Shape(B=1, N=32, K=8, T=512, H=128, P=16384, S=64, M=128),
    "h256": Shape(B=8, N=16, K=8, T=1, H=256, P=4096, S=64, M=64),
    "h64": Shape(B=32, N=32, K=8, T=1, H=64, P=16384, S=64, M=128),
    "h64_page128": Shape(B=32, N=32, K=8, T=1, H=64, P=8192, S=128, M=64),
    "h80": Shape(B=32, N=32, K=8, T=1, H=80, P=2048, S=128, M=64),
    "h96": Shape(B=32, N=32, K=8, T=1, H=96, P=2048, S=128, M=64),
}
"""Compiled ahead of time for chips: Llama-3.1-8B's heads at 8k slots a stream, and other head dims."""
