"""RULER's vt (https://arxiv.org/abs/2404.06654): five variables hold a number, by four hops.

The five lines stand in order at random lines of a text that says nothing. A worked example with names of
three letters stands in front; it has eight noise lines (RULER's has about 500 tokens).
"""

from __future__ import annotations

from kvjax.eval.tasks import hay, scorers
from kvjax.eval.tasks.maker import Maker, Piece, Rng, join, strings
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

HOPS = 4
EXAMPLE_LINES = 8
TASK = "Follow the chains of variable assignments that are hidden in the following text."
CAPITALS, DECIMAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"


def chain(number: str, names: list[str]) -> list[str]:
    """The assignments: a number to the first name, each name to the next."""
    values = [number, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {value}" for name, value in zip(names, values)]


def asked(number: str, count: int) -> tuple[str, str]:
    """(question, prefix)."""
    return (
        f"\nQuestion: Which variables are assigned the value {number} in the text above?",
        f"\nAnswer: {count} variables are assigned the value {number}, they are:",
    )


def make(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    number, other = strings(rng, 2, 5, DECIMAL)
    names, short = strings(rng, HOPS + 1, 5, CAPITALS), strings(rng, HOPS + 1, 3, CAPITALS)
    at = [
        (place, (line, False))
        for place, line in zip(hay.places(rng, HOPS + 1, EXAMPLE_LINES), chain(other, short))
    ]
    example = hay.woven(hay.noise(EXAMPLE_LINES), at, "\n")
    head: list[Piece] = [(TASK + "\n", False), *example]
    head += [("".join(asked(other, HOPS + 1)) + " " + " ".join(short) + ".", False), (f"\n\n{TASK}\n", False)]
    marks = sorted(rng.random(HOPS + 1))

    def build(lines: int) -> Sample:
        needles = [(int(mark * (lines + 1)), (line, True)) for mark, line in zip(marks, chain(number, names))]
        context, spans = join([*head, *hay.woven(hay.noise(lines), needles, "\n")])
        question, prefix = asked(number, HOPS + 1)
        answer = " " + " ".join(names)
        return Sample(
            context=context,
            question=question,
            prefix=prefix,
            answer=answer,
            refs=tuple(names),
            spans=spans,
            max_new=maker.count(answer) + 4,
        )

    return maker.fit(build, maker.length // 15, least=1)


def score(output: str, sample: Sample) -> float:
    """Share of the names found."""
    return scorers.all_found(output, sample.refs)


TASKS = (Task(name="vt", group="ruler", fits=1024, make=make, score=score),)
