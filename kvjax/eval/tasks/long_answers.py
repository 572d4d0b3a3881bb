"""Tasks whose answers are long and state themselves what they need later.

said_pairs    a short text in front; the answer states word pairs and goes on with book text. At its end, 500
              to 1,500 tokens later, each key comes once more.
listed_pairs  pairs in front; the answer writes all of them out in their order, and goes on in the same way.
              A key then stands twice before: in the prompt, and in the answer.

A row of said_pairs; what is scored is between bars:

  text    Pairs: k1 -> v1, k2 -> v2 ...  book text ...  k2 -> |v2|  k1 -> |v1| ...
  context answer ---------------------------------------------------------------

The scored words are the model's own: each is fed back as the model wrote it. All else of the answer is
given, as a user's next words are in a conversation. Teacher-forced is measured beside it (``Each.found``).
``gap`` is the distance between list and questions, in tokens.

Not here is what the embedded model cannot do (full cache, 1,024 tokens, 8 samples). It writes pairs out
from the prompt with 16 % of the lines right, 28 % behind the first two; of 24 listed words it has 66 % in
place and no list whole; of numbered lists 0 to 3 %, of a passage of four sentences 20 %: it loses its place
and repeats itself. Of a chain of five variables, written step by step as assignments or equations, it gets
no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.pairs import pair_lines
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng

PAIRS = 96
"""Tokens of length a pair."""
FARTHEST = 1500
"""Most tokens between a list and its questions."""
HEADING = "\nPairs:\n"
LEAD = 4
"""Sentences in front of said pairs."""


def asked(keys: Sequence[str], values: Sequence[str], order: Sequence[int]) -> list[Piece]:
    """Each pair once more, in this order; the values are marked."""
    return [
        piece for i in order for piece in ((f"\n{keys[i]} ->", False), (f" {values[i]}", True), ("\n", False))
    ]


def _pairs(rng: Rng, maker: Maker) -> tuple[str, list[Piece]]:
    """The list, and its questions in random order."""
    count = max(2, maker.length // PAIRS)
    words = maker.words(rng, 2 * count)
    keys, values = words[:count], words[count:]
    return pair_lines(keys, values), asked(keys, values, rng.permutation(count).tolist())


def _answer(listed: str, between: str, again: Sequence[Piece], maker: Maker) -> dict[str, Any]:
    """The fields of a sample that are about its answer."""
    answer, scored = join([(f"{HEADING}{listed}\n{between}", False), *again])
    return {"answer": answer, "scored": scored, "tags": {"gap": [maker.count(between)] * len(scored)}}


def said_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of pairs that only the answer states."""
    said, again = _pairs(rng, maker)
    text = maker.window(rng, maker.data.essays())
    front, text = " ".join(text[:LEAD]), text[LEAD:]
    near = [n for n in range(len(text) + 1) if maker.count(" ".join(text[:n])) <= FARTHEST]

    def build(units: int) -> Sample:
        return Sample(context=front, **_answer(said, " ".join(text[:units]), again, maker))

    return maker.fit(build, near[-1], least=1)


def listed_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of a list that the answer writes out, and then is asked about."""
    listed, again = _pairs(rng, maker)
    text = maker.window(rng, maker.data.essays())
    start = len(HEADING) - 1

    def build(units: int) -> Sample:
        before, between = (" ".join(part) for part in (text[: units // 2], text[units // 2 : units]))
        return Sample(
            context=f"{HEADING[1:]}{listed}\n{before}",
            spans=((start, start + len(listed)),),
            **_answer(listed, between, again, maker),
        )

    return maker.fit(build, len(text), least=2)


TASKS = tuple(
    Task(name=make.__name__, group="long", fits=1024, make=make, metric="recall", asks=False, long=True)
    for make in (said_pairs, listed_pairs)
)
