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

import math

import numpy as np

from train.rows import ANSWER, HAYSTACK, TAIL, Source
from train.tasks.pieces import Part, Row, distinct, framed, join, pick, strings

CWE_FITS = 256
FWE_FITS = 512
CWE_FULL = 1024
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ZETA = math.pi**2 / 6

CWE_TASK = "Below is a numbered list of words. Some of them stand in it more often than the others."
FWE_TASK = "Read the following coded text and count how often each coded word occurs. Ignore the dots."


def cwe(rng: np.random.Generator, source: Source, length: int, *, full: bool | None = None) -> Row | None:
    """One row of common words.

    Args:
      rng: consumed.
      source: key words, and the text that fills the row.
      length: N, tokens of the row.
      full: ten words with a worked example; None draws, from 1024 tokens on.

    Returns:
      (ids int32 [N], loss weight float32 [N]); None when it does not fit.
    """
    if full is None:
        full = length >= CWE_FULL and rng.random() < 0.6
    most = 5 if length < 512 else 7
    common, often, once = (
        (10, 6, 1) if full else (int(rng.integers(3, most)), int(rng.integers(3, most - 1)), 1)
    )
    if full and length >= 4096:
        often, once = 30, 3
    example = _list(rng, distinct(rng, source, 20), 10, 3, 1) if full else None
    shown: list[Part] = [] if example is None else [*_asked(example, 10), ("\n\n", HAYSTACK)]
    used = set() if example is None else set(example)
    front = len(join(source, shown)[0]) if shown else 0
    words = distinct(rng, source, common + length // (6 * once), without=used)
    # " 12. word" costs its digits, a blank, a dot and the word.
    cost = 4.5 + np.mean([len(e.ids) for e in source.tokenizer.encode_batch([" " + word for word in words])])
    room = length - front - 60 - int(common * 8)
    count = min(len(words), common + int((room / cost - common * often) / once))
    if not full:
        count = min(count, int(rng.integers(common + 2, max(common + 3, count + 1))))
    while count >= common + 2:
        items = _list(rng, words[:count], common, often, once)
        made = framed(rng, source, length, [*shown, *_asked(items, common)])
        if made is not None:
            return made
        count -= max(1, count // 16)
    return None


def _list(rng: np.random.Generator, words: list[str], common: int, often: int, once: int) -> list[str]:
    """The first ``common`` words ``often`` times and the others ``once`` each, shuffled."""
    items = words[:common] * often + words[common:] * once
    return [items[i] for i in rng.permutation(len(items))]


def _asked(items: list[str], common: int) -> list[Part]:
    """List, question and numbered answer."""
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    most = sorted(counts.values())[-common]
    best = [word for word, count in counts.items() if count >= most]
    listed = " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    question = f"Question: What are the {common} most common words in the above list?"
    parts: list[Part] = [
        (f"{CWE_TASK}\n{listed}\n", HAYSTACK),
        (f"{question}\nAnswer: The {common} words that stand most often in the list are:", TAIL),
    ]
    for i, word in enumerate(best, 1):
        parts += [(f" {i}.", TAIL), (f" {word}", ANSWER)]
    return [*parts, (".", TAIL)]


def fwe(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row of frequent coded words, as :func:`cwe` returns it."""
    size = pick(rng, (4, 6, 6)) if length < 512 else 6
    words = strings(rng, source, max(12, length // 50), size, LETTERS)
    cost = np.mean([len(source.encode(" " + word)) for word in words])
    dots = len(source.encode(" ..."))
    # Six tokens in ten are dots: 1 / zeta(2).
    count = int((length - 80) / (dots / ZETA + cost * (1 - 1 / ZETA)) * rng.uniform(0.75, 1.05))
    while count >= 53:  # below, ranks 4 and 5 are as frequent
        made = framed(rng, source, length, _coded(rng, words, count))
        if made is not None:
            return made
        count -= max(2, count // 24)
    return None


def _coded(rng: np.random.Generator, words: list[str], count: int) -> list[Part]:
    """Text, question and answer."""
    counts = [int(count / ((rank + 1) ** 2 * ZETA)) for rank in range(len(words))]
    printed = ["...", *words[1:]]
    items = [word for word, many in zip(printed, counts) for _ in range(many)]
    text = " ".join(items[i] for i in rng.permutation(len(items)))
    question = "Question: What are the three most frequent coded words in the above text?"
    prefix = "Answer: The three coded words that occur most often are:"
    return [
        (f"{FWE_TASK}\n{text}\n", HAYSTACK),
        (f"{question}\n{prefix}", TAIL),
        (" " + " ".join(words[1:4]), ANSWER),
        (".", TAIL),
    ]
