"""Reranking: passages with three attributes each, best match first (after HELMET, arXiv 2410.02694).

"[ID: 37] Harbor likes river, fears window and lives near garden.": a passage's grade is how many of
the query's three attributes it shares, 0 to 3. One passage has grade 3, some have 2 and 1, most 0.
The answer lists the identifiers of all passages that share something, by grade, equals in the order
of the passages: "37 > 12 > 55". Identifiers are random numbers of two digits; 8, 16 or 32 passages
(4 to 6 below 512 tokens).
Fits from 256 tokens on; 16 passages from 1024, 32 from 2048.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.rerank import TASK, passages, words_needed
from kvjax.eval.tasks.words import pick
from train.embedded.tasks.pieces import Part, Row, distinct, framed
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256


def row(rng: np.random.Generator, source: Source, length: int, *, count: int | None = None) -> Row | None:
    """One row of ``count`` passages."""
    if count is None:
        count = pick(rng, [k for k in (8, 16, 32) if 64 * k <= length] or [4, 5])
    words = distinct(rng, source, words_needed(count))
    if len(words) < words_needed(count):
        return None
    drawn = passages(rng, words)
    parts: list[Part] = [(TASK + "\n" + "\n".join(drawn.texts), HAYSTACK)]
    parts += [(f"\nQuery: {drawn.query}\nRanking:", TAIL)]
    for n, number in enumerate(drawn.best):
        parts += [(" >" if n else "", TAIL), (f" {number}", ANSWER)]
    return framed(rng, source, length, [*parts, (".", TAIL)])
