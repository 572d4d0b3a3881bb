"""Arithmetic word problems with worked steps (after GSM8K, arXiv 2110.14168): numbers stay below 100.

A problem is a first number and 2 to 4 steps (more, fewer, twice, three times, half); its solution
writes every step and ends "#### n". Solved problems stand in front of the last one: 4 to 8 where they
fit, and the rest of the row is text. The last solution is the answer; those in front have the weight
of plain text. Problems have two steps below 384 tokens.
Fits from 256 tokens on, with one or two problems in front; from 1024 on with four or more.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.arithmetic import problem
from train.embedded.tasks.pieces import Part, Row, distinct, framed, join
from train.rows import ANSWER, TAIL, TEXT, Source

FITS = 256


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    steps: int | None = None,
    shots: int | None = None,
) -> Row | None:
    """One row; ``steps`` of each problem, and at most ``shots`` solved problems in front."""
    steps = int(rng.integers(2, 5 if length >= 384 else 3)) if steps is None else steps
    wanted = int(rng.integers(4, 9)) if shots is None else shots
    words = distinct(rng, source, 2 * (wanted + 1))
    if len(words) < 2 * (wanted + 1):
        return None
    problems: list[list[Part]] = []
    for i in range(wanted + 1):
        question, solution, _ = problem(rng, words[2 * i].capitalize(), words[2 * i + 1], steps, sorted)
        problems.append([(f"{question}\nAnswer:", TAIL), (solution, TEXT)])
    costs = np.cumsum([len(join(source, [("\n\n", TAIL), *parts])[0]) for parts in problems])
    fitting = int(np.searchsorted(costs, length - 4, side="right"))
    if fitting < (2 if shots is None else wanted + 1):
        return None
    parts = [part for i, own in enumerate(problems[:fitting]) for part in (("\n\n" if i else "", TAIL), *own)]
    parts[-1] = parts[-1][0], ANSWER
    return framed(rng, source, length, parts)
