"""Named shapes of vertical_slash, for tests and benchmarks alike; small ones are those of gated."""

from __future__ import annotations

from pallas_kernels.gated.shapes import TEST, Shape

__all__ = ["BENCH", "BLOCKED", "CHIP", "TEST", "Shape"]

# One query past two blocks; the window begins inside a block of keys.
BLOCKED = Shape(B=2, N=4, K=2, T=1025, H=32, window=300)
CHIP = {
    "h128": Shape(B=1, N=32, K=8, T=16384, H=128, window=256),
    "odd_h64": Shape(B=2, N=4, K=2, T=1000, H=64, window=64),
    "odd_h96": Shape(B=1, N=2, K=2, T=513, H=96, window=64),
    "h256": Shape(B=1, N=8, K=4, T=4096, H=256, window=1024),
}
BENCH = {
    "prompt_8k": Shape(B=1, N=4, K=2, T=8192, H=64, window=64),
    "prompt_32k": Shape(B=1, N=4, K=2, T=32768, H=64, window=256),
    "llama8b_32k": Shape(B=1, N=32, K=8, T=32768, H=128, window=256),
}
