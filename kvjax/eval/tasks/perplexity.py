"""Continuation perplexity: half a window is read and compressed, the other half is teacher-forced.

Windows do not overlap and are the same for every seed. WikiText-2's test articles stand one after the
other, as they are tokenized in the original file; books are held-out ones without line breaks, or the
grammar's where there are none.
"""

from __future__ import annotations

import functools
import re

from kvjax.eval.tasks.data import Data, unwrap
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng

WIKITEXT = "wikitext2/test.txt.gz"
BOOKS = ("books/heldout/nltk_carroll_alice.txt.gz", "books/heldout/nltk_chesterton_thursday.txt.gz")


@functools.cache
def _words(data: Data, names: tuple[str, ...], wrapped: bool) -> tuple[str, ...]:
    """Words with the white space before them."""
    if data.folder is None:
        return tuple(re.findall(r"\s*\S+", " ".join(data.novel())))
    text = "\n".join(data.raw(name).decode(errors="ignore") for name in names)
    return tuple(re.findall(r"\s*\S+", text if wrapped else unwrap(text)))


def make(names: tuple[str, ...], wrapped: bool, _: Rng, maker: Maker) -> Sample:
    """The window of this index."""
    words = _words(maker.data, names, wrapped)
    start = maker.index * maker.length % (len(words) - maker.length)

    def build(half: int) -> Sample:
        window = words[start : start + 2 * half]
        return Sample(context="".join(window[:half]).lstrip(), answer="".join(window[half:]))

    return maker.fit(build, maker.length // 2, least=1)


def _task(name: str, files: tuple[str, ...], wrapped: bool, needs: tuple[str, ...]) -> Task:
    window = functools.partial(make, files, wrapped)
    return Task(name=name, group="ppl", fits=128, make=window, metric="perplexity", asks=False, needs=needs)


TASKS = (
    _task("ppl_wikitext", (WIKITEXT,), True, (WIKITEXT,)),
    _task("ppl_books", BOOKS, False, ()),
)
