"""The tasks that measure the embedded model: RULER's, and others that it was or was not trained for.

Rows of ``RULER`` without books take key words from the tokenizer's vocabulary and their haystack from fixed
sentences, so that they need no texts.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from train import rows
from train.embedded import tasks
from train.embedded.setup import Setup
from train.embedded.tasks import niah, tracking, words
from train.embedded.tasks.pieces import NOISE, RowFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A task in the form in which it is evaluated.

    Attributes:
      row: draws a row.
      books: whether its haystack is book text.
      lengths: tokens of a row.
    """

    row: RowFn
    books: bool
    lengths: tuple[int, ...] = (512, 1024, 2048)


def _niah(form: str) -> Question:
    books = niah.FORMS[form].hay == "book"
    return Question(row=functools.partial(niah.row, form=form, full=True), books=books)


def _again(name: str, *lengths: int) -> Question:
    return Question(row=tasks.TASKS[name], books=True, lengths=lengths)


RULER = {f"niah_{form}": _niah(form) for form in niah.FORMS} | {
    "vt": Question(
        row=functools.partial(tracking.row, hops=4, example=True), books=False, lengths=(1024, 2048)
    ),
    "cwe": Question(row=functools.partial(words.cwe, full=True), books=False, lengths=(1024, 2048)),
    "fwe": Question(row=words.fwe, books=False),
}
"""RULER's tasks without its two on Wikipedia questions."""

OTHERS = {
    name: _again(name, 512, 1024)
    for name in ("stories", "labels", "rerank", "arithmetic", "dialogue", "pairs", "associations")
}


def vocabulary_source(have: Setup) -> rows.Source:
    """A source without texts: held-out words that are single tokens, and a haystack of fixed sentences."""
    tokenizer = have.tokenizer
    tokens = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    key_words = sorted({t[1:] for t in tokens if t[:1] == " " and t[1:].islower() and t[1:].isalpha()})
    long = [word for word in key_words if 4 <= len(word) <= 9]
    text = np.asarray(tokenizer.encode(("\n" + NOISE) * 200).ids, np.int32)
    return rows.make_source(tokenizer, text, long, held_out=True)
