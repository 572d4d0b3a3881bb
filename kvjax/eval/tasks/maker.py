"""What generators of samples are given: words, haystacks, token counts, and a way to fill a length.

A text is built of pieces; pieces that hold part of the answer are marked, and their characters become
the sample's spans. How many units of haystack fit is searched (as RULER does): the largest number for
which the encoded sample is no longer than asked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from kvjax.eval.errors import EvalError, TooLongError
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.sample import Sample, Span, encode, length
from kvjax.eval.tasks.words import held_out_word
from kvjax.text import Text

NOISE = (
    "The road is long.",
    "The hill is steep.",
    "The wind is cold.",
    "Up we climb.",
    "Down we come again.",
)
"""Five sentences that say nothing, one haystack line."""

Rng = np.random.Generator
Item = TypeVar("Item")
Piece = tuple[str, bool]
"""(text, does it hold part of the answer?)"""


def pick(rng: Rng, items: Sequence[Item]) -> Item:
    """One of them."""
    return items[int(rng.integers(len(items)))]


def shuffled(rng: Rng, items: Sequence[Item]) -> list[Item]:
    """All of them in random order."""
    return [items[i] for i in rng.permutation(len(items))]


def join(pieces: Sequence[Piece]) -> tuple[str, tuple[Span, ...]]:
    """The text, and the characters of its marked pieces."""
    at, spans, texts = 0, [], []
    for text, marked in pieces:
        if marked:
            spans.append((at, at + len(text)))
        at += len(text)
        texts.append(text)
    return "".join(texts), tuple(spans)


def listed(names: Sequence[str]) -> str:
    """a, b, and c."""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maker:
    """A length to fill, for one tokenizer.

    Attributes:
      text: the tokenizer.
      data: texts and words.
      length: L, the most tokens of a sample, everything counted.
      index: number of the sample; what takes turns goes by it.
    """

    text: Text
    data: Data
    length: int
    index: int = 0

    def count(self, text: str) -> int:
        """Tokens of a piece of text."""
        return _count(self.text, text)

    def size(self, sample: Sample) -> int:
        """Tokens of a sample, everything counted."""
        return length(encode(self.text, sample), sample.max_new)

    def fit(self, build: Callable[[int], Sample], most: int, *, least: int = 0) -> Sample:
        """The sample of the most units that is no longer than ``length``.

        Args:
          build: units to a sample; grows with them, and equal units give equal samples.
          most, least: units to search between, both included.

        Raises:
          TooLongError: when even the least is too long.
        """
        sample = build(least)
        if self.size(sample) > self.length:
            raise TooLongError(
                f"a sample has {self.size(sample)} tokens at least and does not fit into {self.length}. "
                "Ask for a larger --lengths."
            )
        low, high, best = least, most, sample
        while low < high:
            middle = (low + high + 1) // 2
            sample = build(middle)
            if self.size(sample) <= self.length:
                low, best = middle, sample
            else:
                high = middle - 1
        return best

    def key_words(self) -> tuple[str, ...]:
        """The evaluation's fifth of the word list; without the data pack, of the tokenizer's own words."""
        if self.data.folder is not None:
            return self.data.words()
        return _own_words(self.text) or self.data.words()

    def short_words(self) -> tuple[str, ...]:
        """The key words that are one token behind a blank; all of them if the tokenizer has none of those."""
        pool = self.key_words()
        return tuple(word for word in pool if self.count(f" {word}") == 1) or pool

    def words(self, rng: Rng, number: int, *, parts: int = 1, without: Collection[str] = ()) -> list[str]:
        """``number`` different keys of ``parts`` key words each, joined by hyphens, none of ``without``.

        Raises:
          EvalError: there are not so many.
        """
        pool = self.key_words()
        if number + len(without) > len(pool) ** parts:
            raise EvalError(
                f"{number} key words are asked for, and there are {len(pool)}. Give a smaller --lengths."
            )
        found: dict[str, None] = {}
        while len(found) < number:
            key = "-".join(pick(rng, pool) for _ in range(parts))
            if key not in without:
                found[key] = None
        return list(found)

    def window(self, rng: Rng, sentences: Sequence[str], tokens: int | None = None) -> list[str]:
        """Consecutive sentences of about that many tokens and a few more, from a random one on (around)."""
        tokens = self.length if tokens is None else tokens
        start, mean = int(rng.integers(len(sentences))), 12
        count = min(len(sentences), tokens // mean + 8)
        return [sentences[(start + i) % len(sentences)] for i in range(count)]


@functools.lru_cache(maxsize=65_536)
def _count(tokenizer: Text, text: str) -> int:
    return len(tokenizer.encode(text, bos=False))


@functools.lru_cache(maxsize=4)
def _own_words(text: Text) -> tuple[str, ...]:
    """Lower-case words of 4 to 9 letters that are tokens of their own; () where there are few."""
    tokens = (text.decode([i]) for i in range(text.tokenizer.get_vocab_size()))
    found = {
        t[1:] for t in tokens if t[:1] == " " and 5 <= len(t) <= 10 and t[1:].isalpha() and t[1:].islower()
    }
    mine = tuple(sorted(word for word in found if word.isascii() and held_out_word(word)))
    return mine if len(mine) >= 100 else ()


def strings(rng: Rng, count: int, size: int, letters: str, without: Collection[str] = ()) -> list[str]:
    """Different random strings of the evaluation's fifth, by the same checksum as key words."""
    found: dict[str, None] = {}
    while len(found) < count:
        made = "".join(letters[i] for i in rng.integers(0, len(letters), size))
        if held_out_word(made) and made not in without:
            found[made] = None
    return list(found)
