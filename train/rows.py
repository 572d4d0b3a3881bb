"""Rows of training and checks: needles in text, repeated blocks, plain text.

A needle row, N tokens:   <bos> text NEEDLE text NEEDLE text QUESTION ANSWER QUESTION ANSWER
Needles stand anywhere in the text, and up to four are asked for at the end. Checks ask the first question
only; the others give more training signal of the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train import text as texts
from train.text import BOS, SPECIAL, held_out_word

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ANSWER, TAIL, HAYSTACK, TEXT, COPY = 6.0, 0.3, 0.1, 0.5, 1.0
"""Loss weight of a token: the number asked for, its question, text around needles, plain text, a copy."""

DIGITS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What rows are made of.

    Attributes:
      tokenizer: encodes needle sentences.
      text: ids of all text, one array.
      ends: sorted positions in ``text`` right after a sentence's last token.
      short, long: key words of one token (with a leading blank) and of several.
      is_end: by id, whether a sentence may end with that token.
    """

    tokenizer: Tokenizer
    text: np.ndarray
    ends: np.ndarray
    short: tuple[str, ...]
    long: tuple[str, ...]
    is_end: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of text that starts at a blank or a line break."""
        return self.tokenizer.encode(text).ids

    def word(self, rng: np.random.Generator) -> str:
        """A key word: six in ten are single tokens, where both kinds exist."""
        pools = [pool for pool in (self.short, self.long) if pool]
        pool = pools[0] if len(pools) == 1 or rng.random() < 0.6 else pools[1]
        return pool[int(rng.integers(len(pool)))]


def make_source(tokenizer: Tokenizer, text: np.ndarray, words: Sequence[str], *, held_out: bool) -> Source:
    """A source over ``text`` whose key words are the held-out fifth of ``words`` or the other four."""
    stops = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).endswith((".", "!", "?"))]
    chosen = [word for word in words if held_out_word(word) == held_out]
    single = [len(e.ids) == 1 for e in tokenizer.encode_batch([" " + word for word in chosen])]
    return Source(
        tokenizer=tokenizer,
        text=text,
        ends=np.flatnonzero(np.isin(text, stops)) + 1,
        short=tuple(word for word, one in zip(chosen, single) if one),
        long=tuple(word for word, one in zip(chosen, single) if not one),
        is_end=np.isin(np.arange(tokenizer.get_vocab_size()), stops),
    )


def sources(corpus: texts.Corpus, tokenizer: Tokenizer, cache: Path | None) -> tuple[Source, Source, Source]:
    """Training text and key words; the held-out haystack and key words; held-out books."""
    # Raw text and the same text without line breaks: haystacks come in both forms.
    both = corpus.train + tuple(texts.unwrap(book) for book in corpus.train)
    tokens = texts.token_array(tokenizer, both, cache)
    essays = texts.token_array(tokenizer, (texts.unwrap(corpus.essays),), cache)
    books = texts.token_array(tokenizer, corpus.held, cache)
    return (
        make_source(tokenizer, tokens, corpus.words, held_out=False),
        make_source(tokenizer, essays, corpus.words, held_out=True),
        make_source(tokenizer, books, corpus.words, held_out=True),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """How a needle is hidden and asked for; ``{key}`` and ``{value}`` are filled in.

    Attributes:
      hide: the sentence in the text.
      ask: the question, up to where the number follows.
      digits: how long numbers are, one length drawn per row.
      words: how many words make a key, one number drawn per row.
    """

    hide: str
    ask: str
    digits: tuple[int, ...] = (DIGITS,)
    words: tuple[int, ...] = (2,)


SECRET = Wording(
    hide=" The secret number for {key} is {value}.",
    ask="What is the secret number for {key}? The secret number for {key} is",
)
MAGIC = Wording(
    hide=" One of the special magic numbers for {key} is: {value}.",
    ask="What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is",
    digits=(5, 7),
    words=(1, 2),
)
"""The wording of RULER's needle tasks."""

BETWEEN = ("mentioned", "in", "the", "provided", "text")
"""What stands between key and number in its questions only."""


def shortened(rng: np.random.Generator) -> Wording:
    """``MAGIC`` with only the first few of the words ``BETWEEN`` key and number: the fewer, the easier."""
    kept = " ".join(BETWEEN[: int(rng.integers(len(BETWEEN)))])
    return dataclasses.replace(MAGIC, ask=MAGIC.ask.replace(" " + " ".join(BETWEEN), kept and " " + kept))


def needle_row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    keys: int,
    questions: int = 1,
    depth: float | None = None,
    snap: bool = True,
    gap: str = " ",
    wording: Wording = SECRET,
    figures: int = 10,
) -> tuple[np.ndarray, np.ndarray] | None:
    """One row of needles in text.

    Args:
      rng: consumed.
      source: text and key words.
      length: N, tokens of the row.
      keys: needles hidden.
      questions: how many of them are asked for at the end, in random order.
      depth: where the first one asked for stands, 0 the start of the text to 1 its end; None is anywhere.
      snap: whether needles stand at sentence ends.
      gap: what stands in front of a question.
      wording: of needles and questions.
      figures: how many different digits the row's numbers are made of; few of them make numbers that can
        only be distinguished by more than one digit's predecessor.

    Returns:
      (ids int32 [N], loss weight of each id float32 [N]); None when the row is too short.
    """
    words, digits = (_one(rng, choices) for choices in (wording.words, wording.digits))
    names = ["-".join(source.word(rng) for _ in range(words)) for _ in range(keys)]
    pool = np.arange(10) if figures == 10 else rng.permutation(10)[:figures]
    values = ["".join(map(str, pool[rng.integers(0, figures, digits)])) for _ in range(keys)]
    sentences = [source.encode(wording.hide.format(key=k, value=v)) for k, v in zip(names, values)]
    order = rng.permutation(keys)[:questions]
    tail: list[int] = []
    tail_weight: list[float] = []
    for n, i in enumerate(order):
        ask = source.encode(("." if n else "") + gap + wording.ask.format(key=names[i]))
        answer = source.encode(f" {values[i]}")
        tail += ask + answer
        tail_weight += [TAIL] * len(ask) + [ANSWER] * len(answer)
    room = length - 1 - len(tail) - sum(map(len, sentences))
    if room < 8 or len(set(names)) < keys:
        return None
    start = int(rng.integers(0, len(source.text) - room))
    cuts = rng.integers(0, room + 1, keys)
    if depth is not None:
        cuts[order[0]] = int(depth * room)
    if snap:
        cuts = np.array([_sentence_end(source, start, room, int(cut)) for cut in cuts])
    row: list[int] = [BOS]
    done = 0
    for i in np.argsort(cuts, kind="stable"):
        row += source.text[start + done : start + cuts[i]].tolist() + sentences[i]
        done = cuts[i]
    row += source.text[start + done : start + room].tolist()
    weight = [HAYSTACK] * len(row) + tail_weight
    return np.asarray(row + tail, np.int32), np.asarray(weight, np.float32)


def _one(rng: np.random.Generator, choices: tuple[int, ...]) -> int:
    """One of them; a single choice consumes no randomness."""
    return choices[0] if len(choices) == 1 else int(rng.choice(choices))


def _sentence_end(source: Source, start: int, room: int, cut: int) -> int:
    """The last sentence end at or before ``cut`` in the window, else ``cut``; the window's end is kept."""
    if cut == room:
        return cut
    index = int(np.searchsorted(source.ends, start + cut, side="right")) - 1
    end = int(source.ends[index]) - start if index >= 0 else -1
    return end if end > 0 else cut


def copy_row(rng: np.random.Generator, source: Source, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A block of random ids (or of text, three in ten), repeated to the row's end; repeats are weighted."""
    low = max(4, length // 8)
    period = int(np.exp(rng.uniform(np.log(low), np.log((length - 1) // 2 + 1))))
    if rng.random() < 0.3:
        start = int(rng.integers(0, len(source.text) - period))
        block = source.text[start : start + period]
    else:
        block = rng.integers(len(SPECIAL), source.tokenizer.get_vocab_size(), period)
    row = np.concatenate([[BOS], np.tile(block, length // period + 1)])[:length]
    weight = np.where(np.arange(length) > period + 1, COPY, 0.0)
    return row.astype(np.int32), weight.astype(np.float32)


def text_row(rng: np.random.Generator, source: Source, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Plain text."""
    start = int(rng.integers(0, len(source.text) - length))
    row = source.text[start : start + length].astype(np.int32)
    row[0] = BOS
    return row, np.full(length, TEXT, np.float32)
