"""Arithmetic word problems with worked steps (after GSM8K, arXiv 2110.14168): numbers stay below 100.

A problem is a first number and 2 to 4 steps (more, fewer, twice, three times, half); its solution
writes every step and ends "#### n". Solved problems stand in front of the last one: 4 to 8 where they
fit, and the rest of the row is text. The last solution is the answer; those in front have the weight
of plain text. Problems have two steps below 384 tokens.
Fits from 256 tokens on, with one or two problems in front; from 1024 on with four or more.
"""

from __future__ import annotations

import numpy as np

from train.rows import ANSWER, TAIL, TEXT, Source
from train.tasks.pieces import Part, Row, distinct, framed, join, pick

FITS = 256

SAID = {
    "+": ("{who} gets {n} more.", "{who} buys {n} more.", "{who} finds {n} more."),
    "-": ("{who} gives {n} away.", "{who} loses {n} of them.", "{who} sells {n} of them."),
    "* 2": ("Then their number doubles.", "Soon there are twice as many."),
    "* 3": ("Then their number triples.", "Soon there are three times as many."),
    "/ 2": ("Then half of them are gone.", "{who} keeps only half of them."),
}
MOST = 100
"""No number reaches it."""


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    steps: int | None = None,
    shots: int | None = None,
) -> Row | None:
    """One row.

    Args:
      rng: consumed.
      source: key words for people and things, and the text that fills the row.
      length: N, tokens of the row.
      steps: of each problem; None draws 2 to 4.
      shots: solved problems in front; None draws 4 to 8, or what fits.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
    """
    steps = int(rng.integers(2, 5 if length >= 384 else 3)) if steps is None else steps
    wanted = int(rng.integers(4, 9)) if shots is None else shots
    words = distinct(rng, source, 2 * (wanted + 1))
    if len(words) < 2 * (wanted + 1):
        return None
    problems = [_problem(rng, words[2 * i].capitalize(), words[2 * i + 1], steps) for i in range(wanted + 1)]
    costs = np.cumsum([len(join(source, [("\n\n", TAIL), *problem])[0]) for problem in problems])
    fitting = int(np.searchsorted(costs, length - 4, side="right"))
    if fitting < (2 if shots is None else wanted + 1):
        return None
    parts: list[Part] = []
    for i, problem in enumerate(problems[:fitting]):
        (question, _), (solution, _) = problem
        parts += [("\n\n" if i else "", TAIL), (question, TAIL)]
        parts += [(solution, ANSWER if i == fitting - 1 else TEXT)]
    return framed(rng, source, length, parts)


def _problem(rng: np.random.Generator, who: str, thing: str, steps: int) -> list[Part]:
    """Question and solution."""
    number = int(rng.integers(2, 40))
    told = [f"{who} has {number} boxes of {thing}."]
    worked = []
    for _ in range(steps):
        step, value = _step(rng, number)
        said = SAID[step] if step in SAID else SAID[step[0]]
        told.append(pick(rng, said).format(who=who, n=step[2:]))
        worked.append(f"{number} {step} = {value}.")
        number = value
    question = f"Question: {' '.join(told)} How many boxes of {thing} are there?\nAnswer:"
    return [(question, TAIL), (f" {' '.join(worked)}\n#### {number}", ANSWER)]


def _step(rng: np.random.Generator, number: int) -> tuple[str, int]:
    """("+ 7", the new number) or another step that is possible."""
    steps = {}
    if number + 2 < MOST:
        more = int(rng.integers(2, min(50, MOST - number)))
        steps[f"+ {more}"] = number + more
    if number > 3:
        less = int(rng.integers(2, number))
        steps[f"- {less}"] = number - less
    steps |= {f"* {times}": number * times for times in (2, 3) if number * times < MOST}
    if number % 2 == 0:
        steps["/ 2"] = number // 2
    return pick(rng, sorted(steps.items()))
