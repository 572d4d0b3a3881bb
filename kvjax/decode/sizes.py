"""The sizes that programs are compiled for: contexts, pages, chunks, segments; and prompts padded to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE, LONG_PAGE = 64, 256
"""Fewest and most slots of a page, unless told otherwise."""

CHUNK = 256
"""Default tokens of a prefill chunk."""

SEGMENT = 64
"""Most steps compiled into one program between two looks of the host."""

HORIZON = 512
"""Tokens for which a pool makes room when it has to grow while decoding; each growth is a compilation."""


def bucket(n: int) -> int:
    """The size class of a context: the next power of two or 1.5 times one, at least 64."""
    size = 64
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def page_size(longest: int) -> int:
    """Default slots of a page for lists of up to ``longest``: 64, 128 or 256, where that leaves 64 pages."""
    page = PAGE
    while page < LONG_PAGE and longest >= 128 * page:
        page *= 2
    return page


def padded(prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Token ids right-padded with 0, int32 [B, width]."""
    out = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        out[row, : len(prompt)] = np.asarray(prompt, np.int32)
    return out
