"""A JSON object of words and numbers, some asked for (HELMET's json_kv, arXiv 2410.02694).

Pairs of a key word and a number of five digits; one to four keys are asked for behind it. The object
takes the whole row or part of it, text the rest.
Fits from 256 tokens on.
"""

from __future__ import annotations

import json

import numpy as np

from kvjax.eval.tasks.pairs import JSON_TASK
from train.embedded.tasks.pieces import Part, Row, distinct, framed
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    pairs: int | None = None,
    questions: int | None = None,
) -> Row | None:
    """One row of so many pairs, of which some are asked for."""
    questions = int(rng.integers(1, 5 if length >= 512 else 3)) if questions is None else questions
    count = pairs
    if count is None:
        count = max(2, questions, int(rng.uniform(0.4, 1.0) * (length - 24 * questions - 24) / 14))
    words = distinct(rng, source, count)
    if len(words) < min(count, 16):
        return None
    numbers = rng.integers(10_000, 100_000, len(words)).tolist()
    while len(words) >= max(2, questions):
        values = dict(zip(words, numbers))
        parts: list[Part] = [(f"{JSON_TASK}\n{json.dumps(values)}", HAYSTACK)]
        for i in rng.permutation(len(values))[:questions]:
            key = words[i]
            parts += [(f'\nThe value of "{key}" is', TAIL), (f" {values[key]}", ANSWER), (".", TAIL)]
        filled = framed(rng, source, length, parts)
        if filled is not None or pairs is not None:
            return filled
        words = words[: len(words) - max(1, len(words) // 8)]
    return None
