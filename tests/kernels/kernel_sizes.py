"""Small sizes that the tests run every implementation of an operation with."""

from pallas_kernels.blockwise.work import BlockwiseSizes
from pallas_kernels.gated.work import SelfAttentionSizes
from pallas_kernels.phi.work import PhiSizes
from pallas_kernels.ragged_decode.work import RaggedDecodeSizes

BLOCKWISE = {
    "g1_h32": BlockwiseSizes(B=2, N=2, K=2, T=5, S=17, H=32),
    "g4_h64": BlockwiseSizes(B=1, N=8, K=2, T=33, S=64, H=64),
    "g8_h80": BlockwiseSizes(B=1, N=8, K=1, T=3, S=31, H=80),
    "g4_h96": BlockwiseSizes(B=2, N=4, K=1, T=1, S=65, H=96),
    "g1_h128": BlockwiseSizes(B=1, N=2, K=2, T=1, S=63, H=128),
    "g2_h256": BlockwiseSizes(B=1, N=2, K=1, T=2, S=33, H=256),
}
BLOCKWISE_BLOCKS = BlockwiseSizes(B=2, N=4, K=2, T=257, S=513, H=32)
"""One past a block on both axes, so that the last block of each is all padding but one."""

RAGGED_DECODE = {
    "g1_h32": RaggedDecodeSizes(B=3, N=2, K=2, T=1, H=32, P=40, S=8, M=5),
    "g4_h64": RaggedDecodeSizes(B=3, N=8, K=2, T=2, H=64, P=70, S=16, M=4),
    "g8_h80": RaggedDecodeSizes(B=3, N=16, K=2, T=1, H=80, P=24, S=8, M=3),
    "g4_h96": RaggedDecodeSizes(B=3, N=8, K=2, T=1, H=96, P=24, S=8, M=3),
    "g1_h128": RaggedDecodeSizes(B=3, N=2, K=2, T=3, H=128, P=130, S=4, M=6),
    "g1_h256": RaggedDecodeSizes(B=3, N=2, K=2, T=1, H=256, P=20, S=8, M=3),
    "many_queries": RaggedDecodeSizes(B=3, N=8, K=2, T=40, H=32, P=150, S=8, M=12),
    "page128": RaggedDecodeSizes(B=3, N=8, K=2, T=1, H=64, P=26, S=128, M=4),
}

SELF_ATTENTION = {
    "g1_h32": SelfAttentionSizes(B=2, N=2, K=2, T=17, H=32, window=5),
    "g4_h64": SelfAttentionSizes(B=1, N=8, K=2, T=33, H=64, window=1),
    "g8_h96": SelfAttentionSizes(B=2, N=8, K=1, T=9, H=96, window=0),
    "g1_h128": SelfAttentionSizes(B=1, N=2, K=2, T=63, H=128, window=62),
    "g2_h80": SelfAttentionSizes(B=1, N=4, K=2, T=16, H=80, window=4),
    "g1_h256": SelfAttentionSizes(B=1, N=1, K=1, T=16, H=256, window=3),
}
"""Of gated and vertical_slash."""

GATED_BLOCKS = SelfAttentionSizes(B=2, N=4, K=2, T=513, H=32, window=100)
"""One past a block of queries and of keys; the window ends inside blocks."""

SLASH_BLOCKS = SelfAttentionSizes(B=2, N=4, K=2, T=1025, H=32, window=300)
"""One query past two blocks; the window begins inside a block of keys."""

PHI = {
    "g1_h32": PhiSizes(B=2, N=2, K=2, T=5, S=17, F=8, H=32, R=4),
    "g4_h64": PhiSizes(B=1, N=8, K=2, T=3, S=64, F=64, H=64, R=20),
    "g8_h96": PhiSizes(B=1, N=8, K=1, T=1, S=31, F=16, H=96, R=1),
    "g1_h128": PhiSizes(B=2, N=1, K=1, T=1, S=63, F=128, H=128, R=62),
    "g2_h80": PhiSizes(B=1, N=2, K=1, T=2, S=40, F=24, H=80, R=7),
    "g1_h256": PhiSizes(B=1, N=1, K=1, T=1, S=33, F=16, H=256, R=5),
}
PHI_BLOCKS = PhiSizes(B=1, N=4, K=2, T=2, S=2049, F=16, H=32, R=1030)
"""One token past two blocks."""
