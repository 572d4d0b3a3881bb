"""RULER's vt (https://arxiv.org/abs/2404.06654): five variables hold a number, by four hops.

The five lines stand in order at random lines of a text that says nothing. A worked example with names of
three letters stands in front; it has eight noise lines (RULER's has about 500 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Piece, join, woven
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import CAPITALS, DECIMAL, NOISE, Rng, strings

HOPS = 4
EXAMPLE_LINES = 8
TASK = "Follow the chains of variable assignments that are hidden in the following text."


def assignments(number: str, names: Sequence[str]) -> list[str]:
    """A number to the first name, each name to the next."""
    values = [number, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {value}" for name, value in zip(names, values)]


def question(number: str, count: int) -> tuple[str, str]:
    """(question, prefix) about the ``count`` names that hold a number."""
    return (
        f"\nQuestion: Which variables are assigned the value {number} in the text above?",
        f"\nAnswer: {count} variables are assigned the value {number}, they are:",
    )


def make(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    number, other = strings(rng, 2, 5, DECIMAL)
    names, short = strings(rng, HOPS + 1, 5, CAPITALS), strings(rng, HOPS + 1, 3, CAPITALS)
    places = sorted(rng.choice(EXAMPLE_LINES, HOPS + 1, replace=False).tolist())
    shown = [(place, (line, False)) for place, line in zip(places, assignments(other, short))]
    solved = "".join(question(other, HOPS + 1)) + " " + " ".join(short) + "."
    head: list[Piece] = [(TASK + "\n", False), *woven([NOISE] * EXAMPLE_LINES, shown, "\n")]
    head += [(f"{solved}\n\n{TASK}\n", False)]
    marks, lines = sorted(rng.random(HOPS + 1)), assignments(number, names)

    def build(count: int) -> Sample:
        needles = [(int(mark * (count + 1)), (line, True)) for mark, line in zip(marks, lines)]
        text = join([*head, *woven([NOISE] * count, needles, "\n")])
        return maker.sample(text, *question(number, HOPS + 1), " " + " ".join(names), names)

    return maker.fit(build, maker.length // 15, least=1)


TASKS = (Task(name="vt", group="ruler", fits=1024, make=make, score=scorers.all_found),)
