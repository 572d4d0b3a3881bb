"""Tasks whose answers are long and state themselves what they need later.

said_pairs    a short text in front; the answer states word pairs and goes on with book text. At its end, 500
              to 1,500 tokens later, each key comes once more.
said_facts    the same of secret numbers, stated between the sentences of a book and asked for in questions.
said_chain    variable tracking: the answer assigns a number to a variable, then step by step each variable to
              the next, between lines that say nothing; at its end all that hold the number are to be named.
listed_pairs  pairs in front; the answer writes all of them out in their order, and goes on like said_pairs.
              A key then stands twice before: in the prompt, and in the answer.

A row of said_pairs; what is scored is between bars:

  text    Pairs: k1 -> v1, k2 -> v2 ...  book text ...  k2 -> |v2|  k1 -> |v1| ...
  context answer ---------------------------------------------------------------

The scored words are the model's own: each is fed back as the model wrote it. All else of the answer is
given, as a user's next words are in a conversation. Teacher-forced is measured beside it (``Each.found``).
``gap`` is the distance between list and questions, in tokens.

Not here is what the embedded model cannot do with the full cache: it writes no list or passage out from the
prompt without losing its place, and no chain of variables step by step.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from kvjax.eval.tasks import tracking
from kvjax.eval.tasks.maker import Maker, Piece, join, woven
from kvjax.eval.tasks.pairs import pair_lines
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import CAPITALS, DECIMAL, NOISE, Rng, strings

PAIRS = 96
"""Tokens of length a pair."""
FARTHEST = 1500
"""Most tokens between what is said and its questions."""
FACT = 192
"""Tokens of length a fact."""
HEADING = "\nPairs:\n"
LEAD = 4
"""Sentences in front of what is said."""


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


def _near(text: Sequence[str], maker: Maker) -> int:
    """How many of these sentences have at most ``FARTHEST`` tokens together."""
    counts = range(len(text) + 1)
    return bisect.bisect_right(counts, FARTHEST, key=lambda n: maker.count(" ".join(text[:n]))) - 1


def _answer(listed: str, between: str, again: Sequence[Piece], maker: Maker) -> dict[str, Any]:
    """The fields of a sample that are about its answer."""
    answer, scored = join([(f"{HEADING}{listed}\n{between}", False), *again])
    return {"answer": answer, "scored": scored, "tags": {"gap": [maker.count(between)] * len(scored)}}


def said_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of pairs that only the answer states."""
    said, again = _pairs(rng, maker)
    text = maker.window(rng, maker.data.essays())
    front, text = " ".join(text[:LEAD]), text[LEAD:]

    def build(units: int) -> Sample:
        return Sample(context=front, **_answer(said, " ".join(text[:units]), again, maker))

    return maker.fit(build, _near(text, maker), least=1)


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


def said_facts(rng: Rng, maker: Maker) -> Sample:
    """One sample of secret numbers that only the answer states."""
    count = max(2, maker.length // FACT)
    words = maker.words(rng, 2 * count)
    keys = [f"{a}-{b}" for a, b in zip(words[::2], words[1::2])]
    values = ["".join(map(str, digits)) for digits in rng.integers(0, 10, (count, 5)).tolist()]
    told = [f"The secret number for {key} is" for key in keys]
    again: list[Piece] = []
    for i in rng.permutation(count).tolist():
        question = f"\nWhat is the secret number for {keys[i]}? {told[i]}"
        again += [(question, False), (f" {values[i]}", True), (".", False)]
    text = maker.window(rng, maker.data.essays())
    front, text = " ".join(text[:LEAD]), text[LEAD:]
    facts = "".join(f" {text[i]} {told[i]} {values[i]}." for i in range(count))

    def build(units: int) -> Sample:
        between = " ".join(text[count : count + units])
        answer, scored = join([(f"{facts} {between}", False), *again])
        return Sample(
            context=front, answer=answer, scored=scored, tags={"gap": [maker.count(between)] * count}
        )

    return maker.fit(build, _near(text[count:], maker))


def said_chain(rng: Rng, maker: Maker) -> Sample:
    """One sample of a chain of variables that only the answer assigns."""
    (number,) = strings(rng, 1, 5, DECIMAL)
    names = strings(rng, tracking.HOPS + 1, 5, CAPITALS)
    marks, lines = sorted(rng.random(len(names))), tracking.assignments(number, names)
    asks = "".join(tracking.question(number, len(names)))

    def build(units: int) -> Sample:
        steps = [(int(mark * (units + 1)), (line, False)) for mark, line in zip(marks, lines)]
        written = [("\n", False), *woven([NOISE] * units, steps, "\n"), (asks, False)]
        answer, scored = join([*written, *((f" {name}", True) for name in names)])
        return Sample(context=f"{tracking.TASK}\n{NOISE}", answer=answer, scored=scored)

    return maker.fit(build, maker.length // 15, least=len(names))


TASKS = tuple(
    Task(name=make.__name__, group="long", fits=1024, make=make, metric="recall", asks=False, long=True)
    for make in (said_pairs, said_facts, said_chain, listed_pairs)
)
