"""The one rule that keeps key words of evaluation out of training; ``train`` draws its words by it, too."""

from __future__ import annotations

import zlib


def held_out_word(word: str) -> bool:
    """Whether a key word belongs to evaluation: a fixed fifth, by checksum, the same in every program."""
    return zlib.crc32(word.encode()) % 5 == 0
