"""Passage reranking, NDCG@10 (after HELMET, https://arxiv.org/abs/2410.02694), on generated passages.

A passage has three attributes; its grade is how many of them the query shares. One passage has grade 3,
some 2 and 1, most 0; the answer lists identifiers best first. 8 passages at 512 tokens, 16 at 1024, 32
from 2048 on; book text in front fills the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng, pick, shuffled

FORMS = (
    "likes {}, fears {} and lives near {}",
    "owns {}, sells {} and dreams of {}",
    "came with {}, left with {} and asks for {}",
)
TASK = "Rank the passages by how well they match the query, best first."
POOL = 4
"""Wrong values in use for each attribute."""


@dataclasses.dataclass(frozen=True)
class Passages:
    """Passages with their grades and identifiers, the query, and identifiers by grade, best first."""

    texts: list[str]
    grades: list[int]
    ids: list[int]
    query: str
    best: list[int]


def words_needed(count: int) -> int:
    """Key words of so many passages."""
    return 3 * (1 + POOL) + count


def passages(rng: Rng, words: Sequence[str]) -> Passages:
    """Random passages of ``words_needed`` words."""
    query, wrong = words[:3], [words[3 + POOL * i : 3 + POOL * (i + 1)] for i in range(3)]
    names = words[words_needed(0) :]
    count = len(names)
    few = 1 + count // 8
    some = [3] + [2] * int(rng.integers(1, few + 1)) + [1] * int(rng.integers(1, few + 1))
    grades = shuffled(rng, some + [0] * (count - len(some)))
    form = pick(rng, FORMS)
    ids = shuffled(rng, range(10, 100))[:count]
    texts = []
    for name, grade, number in zip(names, grades, ids):
        right = shuffled(rng, range(3))[:grade]
        values = [query[i] if i in right else pick(rng, wrong[i]) for i in range(3)]
        texts.append(f"[ID: {number}] {name.capitalize()} {form.format(*values)}.")
    best = sorted((i for i in range(count) if grades[i]), key=lambda i: -grades[i])
    return Passages(texts, grades, ids, form.format(*query), [ids[i] for i in best])


def make(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    count = 8 if maker.length < 1024 else 16 if maker.length < 2048 else 32
    drawn = passages(rng, maker.words(rng, words_needed(count)))
    lines: list[Piece] = [(TASK, False)]
    for passage, grade in zip(drawn.texts, drawn.grades):
        lines += [("\n", False), (passage, grade > 0)]
    text = maker.window(rng, maker.data.novel())

    def build(units: int) -> Sample:
        front: list[Piece] = [(" ".join(text[:units]) + "\n\n", False)] if units else []
        return maker.sample(
            join([*front, *lines]),
            f"\nQuery: {drawn.query}",
            "\nRanking:",
            " " + " > ".join(map(str, drawn.best)),
            [f"{number}:{grade}" for number, grade in zip(drawn.ids, drawn.grades)],
        )

    return maker.fit(build, len(text))


TASKS = (Task(name="rerank", group="rerank", fits=512, make=make, score=scorers.reranked, metric="ndcg"),)
