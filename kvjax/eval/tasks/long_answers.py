"""Tasks whose answers are long: the answer itself states what it needs later.

said_pairs: a short text in front; the answer, teacher-forced, states word pairs, goes on with book text, and
at the end, 500 to 1,500 tokens later where there is room, each key comes once more. A value counts when all
its tokens are the likeliest. listed_pairs: pairs in front, which the answer writes out again in their order;
free-running, the share of lines that the output holds at their place; teacher-forced, book text and keys
follow, as above, and a key then stands twice before: in the prompt, and in the answer. gsm_steps: one problem
of as many steps as fit (at most 24), each written down; exact match of the number after "####".
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.arithmetic import problem
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
        gap = maker.count(between)
        return Sample(context=" ".join(front), answer=answer, scored=scored, tags={"gap": [gap] * len(order)})

    def fits(units: int) -> bool:
        return maker.count(" ".join(text[:units])) <= FARTHEST

    return maker.fit(build, max((n for n in range(len(text) + 1) if fits(n)), default=0), least=1)


def listed_pairs(rng: Rng, maker: Maker) -> Sample:
    """One sample of a list that the answer writes out, and then is asked about."""
    keys, values, order = _pairs(rng, maker)
    listed, again = pair_lines(keys, values), asked(keys, values, order)
    lines = tuple(listed.split("\n"))
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        before, between = " ".join(text[: units // 2]), " ".join(text[units // 2 : units])
        head = "Pairs:\n"
        answer, scored = join([(f"{listed}\n{between}", False), *again])
        return Sample(
            context=f"{head}{listed}\n{before}",
            spans=((len(head), len(head) + len(listed)),),
            prefix=HEADING,
            answer=answer,
            scored=scored,
            refs=lines,
            max_new=maker.count(listed) + 4,
            tags={"gap": [maker.count(between)] * len(order)},
        )

    return maker.fit(build, len(text), least=2)


def lines_right(output: str, sample: Sample) -> float:
    """Share of the references that are lines of the output, at their place."""
    written = [line.strip() for line in output.strip().split("\n")]
    return sum(a == b for a, b in zip(written, sample.refs)) / len(sample.refs)


def gsm_steps(rng: Rng, maker: Maker) -> Sample:
    """One problem of many steps behind four solved ones of two to four steps."""
    words = maker.words(rng, 10)
    names = [(words[2 * i].capitalize(), words[2 * i + 1]) for i in range(5)]
    shots = [problem(rng, *name) for name in names[1:]]
    steps = max(5, min(24, maker.length // 64))
    question, answer, final = problem(rng, *names[0], steps=steps)

    def build(units: int) -> Sample:
        context = "\n\n".join(f"{shot}\nAnswer:{solution}" for shot, solution, _ in shots[:units])
        most = maker.count(answer) + 8
        return maker.sample((context, ()), f"\n\n{question}", "\nAnswer:", answer, (final,), max_new=most)

    return maker.fit(build, len(shots), least=1)


TASKS = (
    Task(name="said_pairs", group="long", fits=512, make=said_pairs, metric="recall", asks=False),
    Task(name="listed_pairs", group="long", fits=512, make=listed_pairs, score=lines_right, newline=False),
    Task(name="gsm_steps", group="long", fits=512, make=gsm_steps, score=scorers.gsm8k, newline=False),
)
