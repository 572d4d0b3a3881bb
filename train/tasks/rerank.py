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

from train.rows import ANSWER, HAYSTACK, TAIL, Source
from train.tasks.pieces import Part, Row, distinct, framed, pick

FITS = 256

ATTRIBUTES = (
    ("likes {}", "fears {}", "lives near {}"),
    ("owns {}", "sells {}", "dreams of {}"),
    ("came with {}", "left with {}", "asks for {}"),
)
TASK = "Rank the passages by how well they match the query, best first."
POOL = 4
"""Wrong values in use for each attribute."""


def row(rng: np.random.Generator, source: Source, length: int, *, passages: int | None = None) -> Row | None:
    """One row.

    Args:
      rng: consumed.
      source: key words, and the text that fills the row.
      length: N, tokens of the row.
      passages: how many; None draws what fits.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
    """
    if passages is None:
        passages = pick(rng, [k for k in (8, 16, 32) if 64 * k <= length] or [4, 5])
    words = distinct(rng, source, 3 * (1 + POOL) + passages)
    if len(words) < 3 * (1 + POOL) + passages:
        return None
    query, wrong = words[:3], [words[3 + POOL * i : 3 + POOL * (i + 1)] for i in range(3)]
    names = words[3 * (1 + POOL) :]
    grades = _grades(rng, passages)
    form = pick(rng, ATTRIBUTES)
    identifiers = [10 + int(i) for i in rng.permutation(90)[:passages]]
    told = []
    for name, grade, identifier in zip(names, grades, identifiers):
        right = set(rng.permutation(3)[:grade].tolist())
        values = [query[i] if i in right else pick(rng, wrong[i]) for i in range(3)]
        told.append(f"[ID: {identifier}] {name.capitalize()} {_phrase(form, values)}.")
    best = sorted((i for i in range(passages) if grades[i]), key=lambda i: -grades[i])
    parts: list[Part] = [
        (TASK + "\n" + "\n".join(told), HAYSTACK),
        (f"\nQuery: {_phrase(form, query)}\nRanking:", TAIL),
    ]
    for n, i in enumerate(best):
        parts += [(" >" if n else "", TAIL), (f" {identifiers[i]}", ANSWER)]
    return framed(rng, source, length, [*parts, (".", TAIL)])


def _grades(rng: np.random.Generator, passages: int) -> list[int]:
    """One 3, a few 2 and 1, the rest 0, shuffled."""
    few = 1 + passages // 8
    some = [3] + [2] * int(rng.integers(1, few + 1)) + [1] * int(rng.integers(1, few + 1))
    grades = some + [0] * (passages - len(some))
    return [grades[i] for i in rng.permutation(passages)]


def _phrase(form: tuple[str, str, str], values: list[str]) -> str:
    first, second, third = (part.format(value) for part, value in zip(form, values))
    return f"{first}, {second} and {third}"
