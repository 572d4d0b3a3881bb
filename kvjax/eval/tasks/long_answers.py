"""Tasks whose answers are long, teacher-forced: the answer itself states what it needs later.

said_pairs: a short text in front; the answer states word pairs, goes on with book text, and at the end, 500
to 1,500 tokens later where there is room, each key comes once more. listed_pairs: pairs in front, which the
answer writes out again in their order; book text and keys follow, as above, and a key then stands twice
before: in the prompt, and in the answer. A value counts when all its tokens are the likeliest. The tag
``answer`` is the length of the answer in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.pairs import pair_lines
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng

PAIRS = 96
"""Tokens of length a pair."""
FARTHEST = 1500
"""Most tokens between a pair and its question."""
HEADING = "\nPairs:\n"


def asked(keys: Sequence[str], values: Sequence[str], order: Sequence[int]) -> list[Piece]:
    """Each pair once more, in this order; the values are marked."""
    return [
        piece for i in order for piece in ((f"\n{keys[i]} ->", False), (f" {values[i]}", True), ("\n", False))
    ]


def _pairs(rng: Rng, maker: Maker) -> tuple[list[str], list[str], list[int]]:
    """Keys, values, and the order in which they are asked."""
    count = max(2, maker.length // PAIRS)
    words = maker.words(rng, 2 * count)
    return words[:count], words[count:], rng.permutation(count).tolist()


def said_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of pairs that only the answer states."""
    keys, values, order = _pairs(rng, maker)
    said, again = pair_lines(keys, values), asked(keys, values, order)
    text = maker.window(rng, maker.data.essays())
    front, text = text[:4], text[4:]

    def build(units: int) -> Sample:
        between = " ".join(text[:units])
        answer, scored = join([(f"{HEADING}{said}\n{between}", False), *again])
        tags: dict[str, float | list[float]] = {
            "gap": [maker.count(between)] * len(order),
            "answer": maker.count(answer),
        }
        return Sample(context=" ".join(front), answer=answer, scored=scored, tags=tags)

    def fits(units: int) -> bool:
        return maker.count(" ".join(text[:units])) <= FARTHEST

    return maker.fit(build, max((n for n in range(len(text) + 1) if fits(n)), default=0), least=1)


def listed_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of a list that the answer writes out, and then is asked about."""
    keys, values, order = _pairs(rng, maker)
    listed, again = pair_lines(keys, values), asked(keys, values, order)
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        before, between = " ".join(text[: units // 2]), " ".join(text[units // 2 : units])
        answer, scored = join([(f"{HEADING}{listed}\n{between}", False), *again])
        return Sample(
            context=f"{HEADING[1:]}{listed}\n{before}",
            spans=((len(HEADING) - 1, len(HEADING) - 1 + len(listed)),),
            answer=answer,
            scored=scored,
            tags={"gap": [maker.count(between)] * len(order), "answer": maker.count(answer)},
        )

    return maker.fit(build, len(text), least=2)


TASKS = (
    Task(name="said_pairs", group="long", fits=512, make=said_pairs, metric="recall", asks=False),
    Task(name="listed_pairs", group="long", fits=512, make=listed_pairs, metric="recall", asks=False),
)
