"""Words and random choices of evaluation and training, and the rule that splits words between the two."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Rng = np.random.Generator
Item = TypeVar("Item")

CAPITALS, DECIMAL, HEX = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", "0123456789abcdef"
NOISE = "The road is long. The hill is steep. The wind is cold. Up we climb. Down we come again."
"""Five sentences that say nothing, one haystack line."""


def held_out_word(word: str) -> bool:
    """Whether a key word belongs to evaluation: a fixed fifth, by checksum, the same in every program."""
    return zlib.crc32(word.encode()) % 5 == 0


def pick(rng: Rng, items: Sequence[Item]) -> Item:
    """A random one of the items."""
    return items[int(rng.integers(len(items)))]


def shuffled(rng: Rng, items: Sequence[Item]) -> list[Item]:
    """The items in random order."""
    return [items[i] for i in rng.permutation(len(items))]


def strings(rng: Rng, count: int, size: int, letters: str, *, held_out: bool = True) -> list[str]:
    """``count`` different random strings of ``size`` letters, of evaluation's fifth or of the other four."""
    made: dict[str, None] = {}
    while len(made) < count:
        string = "".join(letters[i] for i in rng.integers(0, len(letters), size))
        if held_out_word(string) == held_out:
            made[string] = None
    return list(made)


def listed(names: Sequence[str]) -> str:
    """a, b, and c."""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
