"""RULER's cwe and fwe (https://arxiv.org/abs/2404.06654): the most frequent words of a list or a coded text.

cwe: ten words 6 times and the others once (from 4096 tokens on 30 and 3 times), shuffled and numbered, a
worked example of twenty words in front; references in the order in which they first stand in the list.
fwe: a word of rank k floor(N / (k^2 zeta(2))) times, rank 1 printed as dots; ranks 2 to 4 are asked for;
max(12, L / 50) words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker
from kvjax.eval.tasks.sample import Sample, Span
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng, shuffled, strings

COMMON = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ZETA = math.pi**2 / 6
LEAST = 53
"""From so many coded words on rank 4 is more frequent than rank 5."""

CWE_TASK = "Below is a numbered list of words. Some of them stand in it more often than the others."
FWE_TASK = "Read the following coded text and count how often each coded word occurs. Ignore the dots."
FWE_QUESTION = "\nQuestion: What are the three most frequent coded words in the above text?"
FWE_PREFIX = "\nAnswer: The three coded words that occur most often are:"


def numbered(items: Sequence[str]) -> str:
    """1. a 2. b ..."""
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def cwe_question(common: int) -> tuple[str, str]:
    """(question, prefix) about so many words."""
    question = f"\nQuestion: What are the {common} most common words in the above list?"
    return question, f"\nAnswer: The {common} words that stand most often in the list are:"


def coded(words: Sequence[str], total: int) -> list[str]:
    """Words of a coded text, rank by rank; ``total`` sets its size."""
    printed = ["...", *words[1:]]
    return [word for rank, word in enumerate(printed, 1) for _ in range(int(total / (rank**2 * ZETA)))]


def _everywhere(text: str, words: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """The text, and characters of every occurrence of the words."""
    return text, tuple(match.span() for match in re.finditer(rf"\b({'|'.join(words)})\b", text))


def cwe(rng: Rng, maker: Maker) -> Sample:
    """One sample of common words."""
    often, once = (6, 1) if maker.length < 4096 else (30, 3)
    words = maker.words(rng, min(len(maker.key_words()), 20 + COMMON + maker.length // (4 * once)))
    shown, common, others = words[:20], words[20 : 20 + COMMON], words[20 + COMMON :]
    example = shuffled(rng, shown[:COMMON] * 3 + shown[COMMON:])
    order = rng.permutation(COMMON * often + len(others) * once)
    question, prefix = cwe_question(COMMON)

    def answer(items: list[str], best: list[str]) -> str:
        return " " + numbered(sorted(best, key=items.index))

    front = f"{CWE_TASK}\n{numbered(example)}{question}{prefix}{answer(example, shown[:COMMON])}.\n\n"

    def build(count: int) -> Sample:
        items = common * often + others[:count] * once
        mixed = [items[i] for i in order if i < len(items)]
        context = _everywhere(f"{front}{CWE_TASK}\n{numbered(mixed)}", common)
        return maker.sample(context, question, prefix, answer(mixed, common), common)

    return maker.fit(build, len(others), least=2)


def fwe(rng: Rng, maker: Maker) -> Sample:
    """One sample of coded words."""
    words = strings(rng, max(12, maker.length // 50), 6, LETTERS)
    draw, best = rng.random(4 * maker.length), words[1:4]

    def build(units: int) -> Sample:
        text = " ".join(item for _, item in sorted(zip(draw, coded(words, LEAST + units))))
        context = _everywhere(f"{FWE_TASK}\n{text}", best)
        return maker.sample(context, FWE_QUESTION, FWE_PREFIX, " " + " ".join(best), best)

    return maker.fit(build, maker.length)


TASKS = (
    Task(name="cwe", group="ruler", fits=1024, make=cwe, score=scorers.all_found),
    Task(name="fwe", group="ruler", fits=512, make=fwe, score=scorers.all_found),
)
