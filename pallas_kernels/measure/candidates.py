"""Blocks that are tried beside a body's own, likeliest first.

Every one of them compiles for its chips without spilling registers (``tests/kernels/test_aot_blocks.py``),
so that time on a device goes to measuring. Not here because they do: 64 tokens of phi, 64 x 64 of gated's
gradients at 4 warps.
"""

from __future__ import annotations

from pallas_kernels.tuning import Blocks

ATTENTION = (
    Blocks(q=128, k=64, warps=8, stages=2),
    Blocks(q=64, k=64, warps=4, stages=3),
    Blocks(q=128, k=128, warps=8, stages=2),
    Blocks(q=64, k=32, warps=4, stages=3),
    Blocks(q=128, k=32, warps=4, stages=2),
)
GRADIENT = (
    Blocks(q=64, k=64, warps=8, stages=2),
    Blocks(q=32, k=64, warps=4, stages=2),
    Blocks(q=64, k=32, warps=4, stages=2),
    Blocks(q=32, k=32, warps=4, stages=3),
)
TILES = (Blocks(q=1024, k=512), Blocks(q=512, k=1024), Blocks(q=256, k=512))
"""Of TPU grids: fewer, larger steps, or smaller ones that spill less to VMEM."""

CANDIDATES: dict[tuple[str, str], dict[str, tuple[Blocks, ...]]] = {
    ("ragged_decode", "triton"): {
        "read": (
            # Page ids come by loads of their own, which take up stages: keys are buffered twice from 5 on.
            # Items are the least that a program takes: a list is divided by its length.
            Blocks(k=64, warps=4, stages=5),
            Blocks(k=64, warps=4, stages=3),
            Blocks(k=128, warps=4, stages=2),
            Blocks(k=64, item=1024, warps=4, stages=2),
            Blocks(k=64, item=256, warps=4, stages=2),
            Blocks(k=64, warps=2, stages=3),
            Blocks(k=128, item=1024, warps=8, stages=2),
        )
    },
    ("ragged_decode", "mosaic_gpu"): {"read": (Blocks(item=2048), Blocks(item=512), Blocks(stages=4))},
    ("blockwise", "mosaic_gpu"): {"forward": (Blocks(k=64), Blocks(k=64, stages=2))},
    ("vertical_slash", "mosaic_gpu"): {"forward": (Blocks(k=64), Blocks(k=64, stages=2))},
    ("blockwise", "triton"): {
        "forward": ATTENTION,
        "backward": (*GRADIENT, Blocks(q=64, k=64, warps=4, stages=2)),
    },
    ("decode_step", "triton"): {
        "step": (
            # Half the tile takes two thirds of the registers; page ids take up stages as above.
            Blocks(k=32, warps=4, stages=2),
            Blocks(k=64, warps=4, stages=5),
            Blocks(k=32, warps=4, stages=5),
            Blocks(k=64, item=256, warps=4, stages=2),
        )
    },
    ("vertical_slash", "triton"): {"forward": ATTENTION},
    ("gated", "triton"): {"forward": ATTENTION, "backward": GRADIENT},
    ("phi", "triton"): {
        "sums": (
            Blocks(k=32, item=512, warps=8),
            Blocks(k=16, item=1024, warps=4),
            Blocks(k=32, item=2048, warps=8),
        )
    },
    ("ragged_decode", "mosaic_tpu"): {"read": (Blocks(item=2048), Blocks(item=1024), Blocks(k=512))},
    ("blockwise", "mosaic_tpu"): {"forward": TILES, "backward": TILES},
    ("decode_step", "mosaic_tpu"): {"step": (Blocks(item=2048), Blocks(item=512))},
    ("vertical_slash", "mosaic_tpu"): {"forward": (Blocks(q=256, k=512), Blocks(q=128, k=1024))},
    ("gated", "mosaic_tpu"): {"forward": TILES, "backward": TILES},
    ("phi", "mosaic_tpu"): {"sums": (Blocks(k=1024), Blocks(k=256))},
}
"""(operation's folder, implementation) to the passes whose blocks can be chosen, and what to try."""

TINY = {
    "triton": (Blocks(q=16, k=32, item=32), Blocks(q=32, k=16, item=64)),
    "mosaic_tpu": (Blocks(q=128, k=128, item=16), Blocks(q=256, k=128, item=8)),
}
"""Instead of them where bodies are interpreted, to see the search work."""
