"""Passage reranking, NDCG@10 (after HELMET, https://arxiv.org/abs/2410.02694), on generated passages.

A passage has three attributes; its grade is how many of them the query shares. One passage has grade 3,
some 2 and 1, most 0; the answer lists identifiers best first. 8 passages at 512 tokens, 16 at 1024, 32
from 2048 on; book text in front fills the length.
"""

from __future__ import annotations

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Piece, Rng, join, pick, shuffled
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

FORMS = (
    "likes {}, fears {} and lives near {}",
    "owns {}, sells {} and dreams of {}",
    "came with {}, left with {} and asks for {}",
)
TASK = "Rank the passages by how well they match the query, best first."
POOL = 4
"""Wrong values in use for each attribute."""


def make(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    passages = 8 if maker.length < 1024 else 16 if maker.length < 2048 else 32
    words = maker.words(rng, 3 * (1 + POOL) + passages)
    query, wrong = words[:3], [words[3 + POOL * i : 3 + POOL * (i + 1)] for i in range(3)]
    names = words[3 * (1 + POOL) :]
    few = 1 + passages // 8
    some = [3] + [2] * int(rng.integers(1, few + 1)) + [1] * int(rng.integers(1, few + 1))
    grades = shuffled(rng, some + [0] * (passages - len(some)))
    form = pick(rng, FORMS)
    ids = shuffled(rng, range(10, 100))[:passages]
    told: list[Piece] = [(f"{TASK}", False)]
    for name, grade, number in zip(names, grades, ids):
        right = shuffled(rng, range(3))[:grade]
        values = [query[i] if i in right else pick(rng, wrong[i]) for i in range(3)]
        told += [("\n", False), (f"[ID: {number}] {name.capitalize()} {form.format(*values)}.", grade > 0)]
    best = sorted((i for i in range(passages) if grades[i]), key=lambda i: -grades[i])
    answer = " " + " > ".join(str(ids[i]) for i in best)
    text = maker.window(rng, maker.data.novel())

    def build(count: int) -> Sample:
        front: list[Piece] = [(" ".join(text[:count]) + "\n\n", False)] if count else []
        context, spans = join([*front, *told])
        return Sample(
            context=context,
            question=f"\nQuery: {form.format(*query)}",
            prefix="\nRanking:",
            answer=answer,
            refs=tuple(f"{number}:{grade}" for number, grade in zip(ids, grades)),
            spans=spans,
            max_new=maker.count(answer) + 4,
        )

    return maker.fit(build, len(text))


def score(output: str, sample: Sample) -> float:
    """NDCG@10; @5 where there are only eight passages."""
    grades = {int(number): int(grade) for number, grade in (ref.split(":") for ref in sample.refs)}
    return scorers.ndcg(scorers.ranking(output), grades, 5 if len(grades) <= 8 else 10)


TASKS = (Task(name="rerank", group="rerank", fits=512, make=make, score=score, metric="ndcg"),)
