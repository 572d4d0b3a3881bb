"""Named shapes of phi, for tests and benchmarks alike."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """log_k [B, K, S, F], v [B, K, S, H], log_q [B, N, T, F]; R tokens of a stream are read exactly."""

    B: int
    N: int
    K: int
    T: int
    S: int
    F: int
    H: int
    R: int


TEST = {
    "g1_h32": Shape(B=2, N=2, K=2, T=5, S=17, F=8, H=32, R=4),
    "g4_h64": Shape(B=1, N=8, K=2, T=3, S=64, F=64, H=64, R=20),
    "g8_h96": Shape(B=1, N=8, K=1, T=1, S=31, F=16, H=96, R=1),
    "g1_h128": Shape(B=2, N=1, K=1, T=1, S=63, F=128, H=128, R=62),
    "g2_h80": Shape(B=1, N=2, K=1, T=2, S=40, F=24, H=80, R=7),
    "g1_h256": Shape(B=1, N=1, K=1, T=1, S=33, F=16, H=256, R=5),
}
# One token past two blocks.
BLOCKED = Shape(B=1, N=4, K=2, T=2, S=2049, F=16, H=32, R=1030)
CHIP = {
    "h128": Shape(B=1, N=32, K=8, T=1, S=16384, F=128, H=128, R=300),
    "odd_h64": Shape(B=2, N=4, K=2, T=3, S=1000, F=64, H=64, R=33),
    "odd_h96": Shape(B=1, N=8, K=1, T=1, S=513, F=64, H=96, R=1),
}
BENCH = {
    "decode": Shape(B=1, N=16, K=4, T=1, S=32768, F=64, H=64, R=328),
    "llama8b": Shape(B=1, N=32, K=8, T=1, S=32768, F=128, H=128, R=328),
}
