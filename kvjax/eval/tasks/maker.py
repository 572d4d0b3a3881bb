"""Tools of the tasks' generators: words, haystacks, token counts, and filling a length.

A text is built of pieces. Pieces that hold part of the answer are marked, and their characters become the
sample's spans. How many units of haystack fit is searched (as RULER does): the largest number for which the
encoded sample is no longer than the length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.eval.errors import EvalError, TooLongError
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.sample import Sample, Span, encode, length
from kvjax.eval.tasks.words import Rng, held_out_word, pick
from kvjax.text import Text

Piece = tuple[str, bool]
"""(text, does it hold part of the answer?)"""


def join(pieces: Sequence[Piece]) -> tuple[str, tuple[Span, ...]]:
    """The text, and the characters of its marked pieces."""
    at, spans, texts = 0, [], []
    for text, marked in pieces:
        if marked:
            spans.append((at, at + len(text)))
        at += len(text)
        texts.append(text)
    return "".join(texts), tuple(spans)


def woven(units: Sequence[str], needles: Sequence[tuple[int, Piece]], gap: str) -> list[Piece]:
    """Units, with each needle behind its number of units; all separated by ``gap``."""
    pieces: list[Piece] = []
    waiting = sorted(needles, key=lambda needle: needle[0])
    for i, unit in enumerate([*units, None]):
        while waiting and (waiting[0][0] <= i or unit is None):
            pieces += [(gap, False), waiting.pop(0)[1]]
        if unit is not None:
            pieces += [(gap, False), (unit, False)]
    return pieces[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maker:
    """A length to fill, for one tokenizer.

    Attributes:
      text: the tokenizer.
      data: texts and words.
      length: L, the most tokens of a sample, everything counted.
      index: number of the sample; some tasks take turns by it.
      chat: is the sample put through the chat template?
    """

    text: Text
    data: Data
    length: int
    index: int = 0
    chat: bool = False

    def count(self, text: str) -> int:
        """Tokens of a piece of text."""
        return _count(self.text, text)

    def sample(
        self,
        text: tuple[str, tuple[Span, ...]],
        question: str,
        prefix: str,
        answer: str,
        refs: Sequence[str],
        *,
        max_new: int | None = None,
        labels: tuple[str, ...] = (),
        tags: dict[str, float | list[float]] | None = None,
    ) -> Sample:
        """A sample with a question; ``text`` is (context, spans), ``max_new`` by default fits the answer."""
        return Sample(
            context=text[0],
            spans=text[1],
            question=question,
            prefix=prefix,
            answer=answer,
            refs=tuple(refs),
            max_new=self.count(answer) + 4 if max_new is None else max_new,
            labels=labels,
            tags=tags or {},
        )

    def fit(self, build: Callable[[int], Sample], most: int, *, least: int = 0) -> Sample:
        """The sample of the most units that is no longer than ``length``.

        Args:
          build: units to a sample; grows with them, and equal units give equal samples.
          most, least: units to search between, both included.

        Raises:
          TooLongError: when even the least is too long.
        """

        def size(sample: Sample) -> int:
            return length(encode(self.text, sample, chat=self.chat), sample.max_new)

        best = build(least)
        if size(best) > self.length:
            raise TooLongError(
                f"a sample has {size(best)} tokens at least and does not fit into {self.length}. "
                "Ask for a larger --lengths."
            )
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            sample = build(middle)
            if size(sample) <= self.length:
                low, best = middle, sample
            else:
                high = middle - 1
        return best

    def key_words(self) -> tuple[str, ...]:
        """Evaluation's fifth of the word list; without the data pack, of the tokenizer's own words."""
        if self.data.folder is not None:
            return self.data.words()
        return _own_words(self.text) or self.data.words()

    def words(self, rng: Rng, number: int, *, parts: int = 1, without: Sequence[str] = ()) -> list[str]:
        """``number`` different keys of ``parts`` key words each, joined by hyphens, none of ``without``.

        Raises:
          EvalError: there are not so many.
        """
        pool = self.key_words()
        if number + len(without) > len(pool) ** parts:
            raise EvalError(
                f"{number} key words are asked for, and there are {len(pool)}. Give a smaller --lengths."
            )
        keys: dict[str, None] = {}
        while len(keys) < number:
            key = "-".join(pick(rng, pool) for _ in range(parts))
            if key not in without:
                keys[key] = None
        return list(keys)

    def window(self, rng: Rng, sentences: Sequence[str]) -> list[str]:
        """Consecutive sentences of about ``length`` tokens and a few more, from a random one on (around)."""
        start = int(rng.integers(len(sentences)))
        count = min(len(sentences), self.length // 12 + 8)
        return [sentences[(start + i) % len(sentences)] for i in range(count)]

    def at_depth(self, units: Sequence[str], depth: float) -> int:
        """How many units precede a needle at ``depth`` (0 start, 1 end), which stands at a unit's end."""
        ends = np.cumsum([self.count(" " + unit) for unit in units])
        return int(np.searchsorted(ends, depth * ends[-1] + 1e-9, side="right")) if len(ends) else 0


@functools.lru_cache(maxsize=65_536)
def _count(tokenizer: Text, text: str) -> int:
    return len(tokenizer.encode(text, bos=False))


@functools.lru_cache(maxsize=4)
def _own_words(text: Text) -> tuple[str, ...]:
    """Lower-case words of 4 to 9 letters that are tokens of their own; () where there are few."""
    tokens = (text.decode([i]) for i in range(text.tokenizer.get_vocab_size()))
    words = {
        t[1:] for t in tokens if t[:1] == " " and 5 <= len(t) <= 10 and t[1:].isalpha() and t[1:].islower()
    }
    own = tuple(sorted(word for word in words if word.isascii() and held_out_word(word)))
    return own if len(own) >= 100 else ()
