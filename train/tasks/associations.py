"""A JSON object of words and numbers, some asked for (HELMET's json_kv, arXiv 2410.02694).

Pairs of a key word and a number of five digits; one to four keys are asked for behind it. The object
takes the whole row or part of it, text the rest.
Fits from 256 tokens on.
"""

from __future__ import annotations

import json

import numpy as np

from train.rows import ANSWER, HAYSTACK, TAIL, Source
from train.tasks.pieces import Part, Row, distinct, framed

FITS = 256
TASK = "Remember the pairs of this JSON object."


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    pairs: int | None = None,
    asked: int | None = None,
) -> Row | None:
    """One row.

    Args:
      rng: consumed.
      source: key words, and the text that fills the row.
      length: N, tokens of the row.
      pairs: how many; None draws up to what fits.
      asked: keys asked for; None draws 1 to 4.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
    """
    asked = int(rng.integers(1, 5 if length >= 512 else 3)) if asked is None else asked
    count = (
        max(2, asked, int(rng.uniform(0.4, 1.0) * (length - 24 * asked - 24) / 14))
        if pairs is None
        else pairs
    )
    words = distinct(rng, source, count)
    if len(words) < min(count, 16):
        return None
    numbers = rng.integers(10_000, 100_000, len(words)).tolist()
    while len(words) >= max(2, asked):
        made = framed(rng, source, length, _parts(rng, dict(zip(words, numbers)), asked))
        if made is not None or pairs is not None:
            return made
        words = words[: len(words) - max(1, len(words) // 8)]
    return None


def _parts(rng: np.random.Generator, values: dict[str, int], asked: int) -> list[Part]:
    parts: list[Part] = [(f"{TASK}\n{json.dumps(values)}", HAYSTACK)]
    for i in rng.permutation(len(values))[:asked]:
        key = list(values)[i]
        parts += [(f'\nThe value of "{key}" is', TAIL), (f" {values[key]}", ANSWER), (".", TAIL)]
    return parts
