"""Variable tracking, RULER's vt (arXiv 2404.06654): follow a chain of assignments through a text.

The first line gives a name a number, "VAR ABCDE = 12345"; each later one, anywhere behind it, gives a
further name the name before, "VAR FGHIJ = VAR ABCDE". Asked for are all names with that number, in
the chain's order. The lines stand between lines that say nothing (or, one time in four, between
sentences of a book); one time in four a second chain with another number stands among them. From
1024 tokens on a worked example with names of three letters comes first, half of the draws; rows of
``many`` have both from 512 tokens on, and ask for the second chain, too.
Fits from 256 tokens on; 1024 with the example; ``many`` from 384 on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.tracking import HOPS, TASK, assignments, question
from kvjax.eval.tasks.words import CAPITALS, DECIMAL, pick
from train.embedded.tasks.pieces import Part, Row, book, join, noise, plain, scatter, stack, strings
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256
MANY_FITS = 384
EXAMPLE_FITS = 1024

Chain = tuple[str, list[str]]
"""A number and the names that hold it, in order."""


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    hops: int | None = None,
    example: bool | None = None,
    second: bool | None = None,
    both: bool = False,
) -> Row | None:
    """One row.

    Args:
      rng, source, length: as in ``RowFn``.
      hops: assignments from name to name; None draws 1 to 4, mostly 4.
      example: whether a worked example stands in front.
      second: whether another chain stands between.
      both: whether that one is asked for behind the first.
    """
    hops = pick(rng, (1, 2, 3, HOPS, HOPS, HOPS)) if hops is None else hops
    if example is None:
        example = length >= EXAMPLE_FITS and rng.random() < 0.5
    if second is None:
        second = length >= EXAMPLE_FITS and rng.random() < 0.25
    numbers = strings(rng, source, 3, 5, DECIMAL)
    names = strings(rng, source, 2 * (hops + 1), 5, CAPITALS)
    hidden = [(numbers[0], names[: hops + 1]), (numbers[1], names[hops + 1 :])][: 1 + second]
    shown: list[Row] = [join(source, [(TASK + "\n", HAYSTACK)])]
    if example:
        short = numbers[2], strings(rng, source, hops + 1, 3, CAPITALS)
        hay = noise(source, int(rng.integers(length // 16, length // 8)))
        shown += [plain(scatter(rng, hay, [source.encode("\n" + line) for line in assignments(*short)]))]
        shown += [join(source, _solved(*short)), join(source, [(f"\n\n{TASK}\n", HAYSTACK)])]
    tail = join(source, [part for chain in hidden[: 1 + both] for part in _solved(*chain)])
    in_book = rng.random() < 0.25
    pieces = [source.encode(f" {x}." if in_book else f"\n{x}") for x in _interleaved(rng, hidden)]
    room = length - 1 - sum(len(span[0]) for span in (*shown, tail)) - sum(map(len, pieces))
    if room < 8:
        return None
    hay = book(rng, source, room) if in_book else noise(source, room)
    return stack(*shown, plain(scatter(rng, hay, pieces)), tail)


def many(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """A row that asks for two or three chains where they fit: the example's, and every hidden one."""
    longer = length >= EXAMPLE_FITS // 2
    return row(
        rng, source, length, example=longer and rng.random() < 0.75, second=rng.random() < 0.4, both=True
    )


def _solved(number: str, names: list[str]) -> list[Part]:
    """Question and answer."""
    return [("".join(question(number, len(names))), TAIL), (" " + " ".join(names), ANSWER), (".", TAIL)]


def _interleaved(rng: np.random.Generator, chains: list[Chain]) -> list[str]:
    """All lines of the chains, each chain in its order."""
    queues = [iter(assignments(*chain)) for chain in chains]
    turns = rng.permutation(np.repeat(np.arange(len(chains)), [len(names) for _, names in chains]))
    return [next(queues[turn]) for turn in turns]
