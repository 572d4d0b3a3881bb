"""RULER's cwe and fwe (https://arxiv.org/abs/2404.06654): the most frequent words of a list or a coded text.

cwe: ten words 6 times and the others once (from 4096 tokens on 30 and 3 times), shuffled and numbered, a
worked example of twenty words in front; references in the order in which they first stand in the list.
fwe: a word of rank k floor(N / (k^2 zeta(2))) times, rank 1 printed as dots; ranks 2 to 4 are asked for;
max(12, L / 50) words.
"""

from __future__ import annotations

import math
import re

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Rng, shuffled, strings
from kvjax.eval.tasks.sample import Sample, Span
from kvjax.eval.tasks.task import Task

COMMON = 10
ZETA = math.pi**2 / 6
LEAST = 53
"""Coded words from which on rank 4 is more frequent than rank 5."""

CWE_TASK = "Below is a numbered list of words. Some of them stand in it more often than the others."
FWE_TASK = "Read the following coded text and count how often each coded word occurs. Ignore the dots."


def numbered(items: list[str]) -> str:
    """1. a 2. b ..."""
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def everywhere(text: str, words: list[str]) -> tuple[Span, ...]:
    """Characters of every occurrence of the words."""
    return tuple(found.span() for found in re.finditer(rf"\b({'|'.join(words)})\b", text))


def cwe(rng: Rng, maker: Maker) -> Sample:
    """One sample of common words."""
    often, once = (6, 1) if maker.length < 4096 else (30, 3)
    pool = min(len(maker.key_words()), 20 + COMMON + maker.length // (4 * once))
    words = maker.words(rng, pool)
    shown, common, others = words[:20], words[20 : 20 + COMMON], words[20 + COMMON :]
    example = shuffled(rng, shown[:COMMON] * 3 + shown[COMMON:])
    order = rng.permutation(COMMON * often + len(others) * once)
    asked = f"\nQuestion: What are the {COMMON} most common words in the above list?"
    prefix = f"\nAnswer: The {COMMON} words that stand most often in the list are:"

    def first(items: list[str], best: list[str]) -> str:
        seen = sorted(best, key=items.index)
        return "".join(f" {i}. {word}" for i, word in enumerate(seen, 1))

    front = f"{CWE_TASK}\n{numbered(example)}{asked}{prefix}{first(example, shown[:COMMON])}.\n\n"

    def build(count: int) -> Sample:
        items = common * often + others[:count] * once
        mixed = [items[i] for i in order if i < len(items)]
        context = f"{front}{CWE_TASK}\n{numbered(mixed)}"
        answer = first(mixed, common)
        return Sample(
            context=context,
            question=asked,
            prefix=prefix,
            answer=answer,
            refs=tuple(common),
            spans=everywhere(context, common),
            max_new=maker.count(answer) + 4,
        )

    return maker.fit(build, len(others), least=2)


def fwe(rng: Rng, maker: Maker) -> Sample:
    """One sample of coded words."""
    words = strings(rng, max(12, maker.length // 50), 6, "abcdefghijklmnopqrstuvwxyz")
    draw = rng.random(4 * maker.length)
    printed = ["...", *words[1:]]

    def build(units: int) -> Sample:
        total = LEAST + units
        items = [w for rank, w in enumerate(printed, 1) for _ in range(int(total / (rank**2 * ZETA)))]
        text = " ".join(item for _, item in sorted(zip(draw, items)))
        answer = " " + " ".join(words[1:4])
        context = f"{FWE_TASK}\n{text}"
        return Sample(
            context=context,
            question="\nQuestion: What are the three most frequent coded words in the above text?",
            prefix="\nAnswer: The three coded words that occur most often are:",
            answer=answer,
            refs=tuple(words[1:4]),
            spans=everywhere(context, words[1:4]),
            max_new=maker.count(answer) + 4,
        )

    return maker.fit(build, maker.length)


def score(output: str, sample: Sample) -> float:
    """Share of the words found."""
    return scorers.all_found(output, sample.refs)


TASKS = (
    Task(name="cwe", group="ruler", fits=1024, make=cwe, score=score),
    Task(name="fwe", group="ruler", fits=512, make=fwe, score=score),
)
