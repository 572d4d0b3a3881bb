"""bAbI's questions 1 to 5 (arXiv 1502.05698), facts alone or hidden in a book (BABILong, arXiv 2406.10149).

Facts stand in order at random sentence ends of book text, or line by line with text before or behind
them. Stories are generated (``stories_world``) or, for training, three in ten come from bAbI's own
training files where ``text.data_folder`` has them (en-10k, CC BY 3.0: 1, 2, 4 and 5). A held-out
source never reads them. (In 2 of 1000 questions 5 of the files somebody gave two things to the same
person and the answer is not the latest.) One to three questions, which end "Answer:", stand behind a
generated story; an answer is one word and a full stop.
Fits from 256 tokens on; question 3 as hard as bAbI's from 1024.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

import numpy as np

from kvjax.eval.tasks.babilong import TASK, parsed
from kvjax.eval.tasks.words import pick
from train import text
from train.embedded.tasks.pieces import Part, Row, book, framed, held_out, join, plain, scatter, stack
from train.embedded.tasks.stories_world import STORIES, Story
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256

REAL_SHARE = 0.3
TOKENS_A_FACT = 15
MOST_FACTS = {1: 10, 2: 32, 3: 96, 4: 2, 5: 48}


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    kind: int | None = None,
    hidden: bool | None = None,
) -> Row | None:
    """One row with a question of a ``kind``, 1 to 5; ``hidden``: its facts among sentences of a book."""
    kind = int(rng.integers(1, 6)) if kind is None else kind
    hidden = rng.random() < 0.6 if hidden is None else hidden
    most = min(MOST_FACTS[kind], (length - 80) // TOKENS_A_FACT)
    story = _story(rng, source, kind, most)
    if story is None:
        return None
    tail: list[Part] = []
    for question, answer in story.questions:
        tail += [(f"\nQuestion: {question}\nAnswer:", TAIL), (f" {answer}", ANSWER), (".", TAIL)]
    if not hidden:
        facts = pick(rng, ("\n", " ")).join(story.facts)
        return framed(rng, source, length, [(TASK + facts, HAYSTACK), *tail])
    head, end = join(source, [(TASK, HAYSTACK)]), join(source, tail)
    pieces = [source.encode(" " + fact) for fact in story.facts]
    room = length - 1 - len(head[0]) - len(end[0]) - sum(map(len, pieces))
    if room < 8:
        return None
    return stack(head, plain(scatter(rng, book(rng, source, room), pieces)), end)


def _story(rng: np.random.Generator, source: Source, kind: int, most: int) -> Story | None:
    """A real or a generated story of at most ``most`` facts."""
    folder = None if held_out(source) else text.data_folder()
    real = rng.random() < REAL_SHARE
    if real and folder is not None and (read := real_stories(folder, kind)):
        for _ in range(20):
            if len((story := pick(rng, read)).facts) <= most:
                return story
    for _ in range(20):
        generated = STORIES[kind](rng, most)
        if generated is not None:
            return generated
    return None


@functools.cache
def real_stories(folder: Path, kind: int, split: str = "train") -> tuple[Story, ...]:
    """Every question of a bAbI file as one story of the facts before it; none where there is no file."""
    files = sorted((folder / "babi" / "en-10k").glob(f"qa{kind}_*_{split}.txt.gz"))
    stories = parsed(gzip.decompress(files[0].read_bytes()).decode()) if files else []
    return tuple(Story(facts=tuple(facts), questions=((q, a),)) for facts, q, a in stories)
