"""Common and frequent words, RULER's cwe and fwe (arXiv 2404.06654): count words over a whole list.

cwe: a numbered, shuffled list of key words, ten of them 6 times, the others once (from 4096 tokens on
30 and 3 times); asked for are the ten. From 1024 tokens on a worked example of twenty words (3 times
and once) comes first; shorter rows, and some of the longer ones, ask for 3 to 6 words that stand 3 to
5 times, without example. Answers are in the order in which the words first stand in the list, the
one order that can be known (scores do not depend on it).

fwe: a text of random words of six letters, the word of rank k floor(n / (k^2 zeta(2))) times; the
most frequent one is printed as "..." and is not asked for, ranks 2, 3 and 4 are, most frequent first.
cwe fits from 256 tokens on, in full, with its example, from 1024; fwe from 512.
"""

from __future__ import annotations

import collections

import numpy as np

from kvjax.eval.tasks import counting
from kvjax.eval.tasks.counting import ZETA, numbered
from kvjax.eval.tasks.words import pick, shuffled
from train.embedded.tasks.pieces import Part, Row, distinct, framed, join, strings
from train.rows import ANSWER, HAYSTACK, TAIL, Source

CWE_FITS = 256
FWE_FITS = 512
CWE_FULL = 1024


def cwe(rng: np.random.Generator, source: Source, length: int, *, full: bool | None = None) -> Row | None:
    """One row of common words; ``full``: ten words with a worked example."""
    if full is None:
        full = length >= CWE_FULL and rng.random() < 0.6
    common, often, once = 10, 6, 1
    if not full:
        most = 5 if length < 512 else 7
        common, often = int(rng.integers(3, most)), int(rng.integers(3, most - 1))
    elif length >= 4096:
        often, once = 30, 3
    shown: list[Part] = []
    example: list[str] = []
    if full:
        words = distinct(rng, source, 20)
        example = shuffled(rng, words[:10] * 3 + words[10:])
        shown = [*_solved(example, 10), ("\n\n", HAYSTACK)]
    front = len(join(source, shown)[0]) if shown else 0
    words = distinct(rng, source, common + length // (6 * once), without=set(example))
    # " 12. word" costs its digits, a blank, a dot and the word.
    cost = 4.5 + np.mean([len(e.ids) for e in source.tokenizer.encode_batch([" " + word for word in words])])
    room = length - front - 60 - int(common * 8)
    count = min(len(words), common + int((room / cost - common * often) / once))
    if not full:
        count = min(count, int(rng.integers(common + 2, max(common + 3, count + 1))))
    while count >= common + 2:
        items = shuffled(rng, words[:common] * often + words[common:count] * once)
        filled = framed(rng, source, length, [*shown, *_solved(items, common)])
        if filled is not None:
            return filled
        count -= max(1, count // 16)
    return None


def _solved(items: list[str], common: int) -> list[Part]:
    """List, question and numbered answer."""
    counts = collections.Counter(items)
    most = sorted(counts.values())[-common]
    best = [word for word, count in counts.items() if count >= most]
    question = "".join(counting.cwe_question(common))
    # The line break before the question belongs to the list.
    parts: list[Part] = [(f"{counting.CWE_TASK}\n{numbered(items)}\n", HAYSTACK), (question[1:], TAIL)]
    for i, word in enumerate(best, 1):
        parts += [(f" {i}.", TAIL), (f" {word}", ANSWER)]
    return [*parts, (".", TAIL)]


def fwe(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row of frequent coded words."""
    size = pick(rng, (4, 6, 6)) if length < 512 else 6
    words = strings(rng, source, max(12, length // 50), size, counting.LETTERS)
    cost = np.mean([len(source.encode(" " + word)) for word in words])
    dots = len(source.encode(" ..."))
    # Six tokens in ten are dots: 1 / zeta(2).
    count = int((length - 80) / (dots / ZETA + cost * (1 - 1 / ZETA)) * rng.uniform(0.75, 1.05))
    while count >= counting.LEAST:
        text = " ".join(shuffled(rng, counting.coded(words, count)))
        question = counting.FWE_QUESTION + counting.FWE_PREFIX
        parts = [(f"{counting.FWE_TASK}\n{text}\n", HAYSTACK), (question[1:], TAIL)]
        filled = framed(rng, source, length, [*parts, (" " + " ".join(words[1:4]), ANSWER), (".", TAIL)])
        if filled is not None:
            return filled
        count -= max(2, count // 24)
    return None
