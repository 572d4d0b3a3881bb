"""Tasks as a trained model is asked them: RULER's, and the others it was or was not trained for.

Rows of ``RULER`` without books draw their key words from the tokenizer's own vocabulary and their haystack
from fixed sentences: anybody gets the same figures without the texts.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from train import rows, tasks
from train.setup import Setup
from train.tasks import niah, tracking, words
from train.tasks.pieces import NOISE, RowFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One task as it is evaluated.

    Attributes:
      row: draws a row in the evaluation's form.
      books: whether its haystack is book text.
      lengths: tokens of a row at which it is asked.
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
"""RULER's tasks but its two on Wikipedia questions, which no model here was trained for."""

OTHERS = {
    name: _again(name, 512, 1024)
    for name in ("stories", "labels", "rerank", "arithmetic", "dialogue", "pairs", "associations")
}


def vocabulary_source(have: Setup) -> rows.Source:
    """Held-out key words that the tokenizer itself holds as single tokens, in text that says nothing."""
    tokenizer = have.tokenizer
    found = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    mine = sorted(
        {word[1:] for word in found if word[:1] == " " and word[1:].islower() and word[1:].isalpha()}
    )
    long = [word for word in mine if 4 <= len(word) <= 9]
    text = np.asarray(tokenizer.encode(("\n" + NOISE) * 200).ids, np.int32)
    return rows.make_source(tokenizer, text, long, held_out=True)
