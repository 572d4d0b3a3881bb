"""Named shapes of gated, for tests and benchmarks alike."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Self-attention: q [B, N, T, H], k, v [B, K, T, H]; the ``window`` latest keys need no gate."""

    B: int
    N: int
    K: int
    T: int
    H: int
    window: int


TEST = {
    "g1_h32": Shape(B=2, N=2, K=2, T=17, H=32, window=5),
    "g4_h64": Shape(B=1, N=8, K=2, T=33, H=64, window=1),
    "g8_h96": Shape(B=2, N=8, K=1, T=9, H=96, window=0),
    "g1_h128": Shape(B=1, N=2, K=2, T=63, H=128, window=62),
    "g2_h80": Shape(B=1, N=4, K=2, T=16, H=80, window=4),
    "g1_h256": Shape(B=1, N=1, K=1, T=16, H=256, window=3),
}
# One past a block of queries and of keys; the window ends inside blocks.
BLOCKED = Shape(B=2, N=4, K=2, T=513, H=32, window=100)
CHIP = {
    "h128": Shape(B=1, N=32, K=8, T=4096, H=128, window=256),
    "odd_h64": Shape(B=2, N=4, K=2, T=1000, H=64, window=64),
    "odd_h96": Shape(B=1, N=2, K=2, T=513, H=96, window=64),
    "h256": Shape(B=1, N=8, K=4, T=2048, H=256, window=256),
}
BENCH = {
    "small_512": Shape(B=8, N=4, K=2, T=512, H=64, window=64),
    "small_2k": Shape(B=2, N=4, K=2, T=2048, H=64, window=64),
    "llama8b_8k": Shape(B=1, N=32, K=8, T=8192, H=128, window=256),
}
