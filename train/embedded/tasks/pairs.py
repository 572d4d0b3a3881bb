"""Recall of many pairs, MQAR (zoology, arXiv 2312.04927): pairs in front, each key asked for once.

Each key comes again at a gap behind the pairs drawn from p(g) ~ g^(a-1), a = 0.01: most soon, some very late.
In token form pairs are two random ids, keys of the lower and values of the upper half of the
vocabulary, other positions random ids that are not a key of the row; loss on the values asked for alone,
since nothing else can be known. In text form a pair is "<word> -> <word>" on a line of its own and
the keys come again between sentences of a book.
Fits from 128 tokens on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.pairs import gaps, pair_lines
from kvjax.eval.tasks.words import pick
from train.embedded.tasks.pieces import Row, book, distinct, held_out, join, plain, stack
from train.rows import ANSWER, HAYSTACK, TAIL, Source
from train.text import SPECIAL, held_out_word

FITS = 128


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    form: str | None = None,
    pairs: int | None = None,
) -> Row | None:
    """One row, in "text" or "token" form; at most N / 16 pairs as token, N / 40 as text."""
    form = pick(rng, ("text", "token")) if form is None else form
    if pairs is None:
        most = max(2, length // (16 if form == "token" else 40))
        pairs = int(np.exp(rng.uniform(np.log(2), np.log(most + 1))))
    return _token(rng, source, length, pairs) if form == "token" else _text(rng, source, length, pairs)


def _token(rng: np.random.Generator, source: Source, length: int, pairs: int) -> Row | None:
    vocab, first = source.tokenizer.get_vocab_size(), len(SPECIAL)
    half, split = (first + vocab) // 2, held_out(source)
    lower = np.asarray([i for i in range(first, half) if held_out_word(str(i)) == split])
    room = (length - 1 - 2 * pairs) // 2
    if room < pairs or len(lower) < pairs:
        return None
    keys, values = rng.choice(lower, pairs, replace=False), rng.integers(half, vocab, pairs)
    other = np.setdiff1d(np.arange(first, vocab), keys)
    ids = rng.choice(other, length - 1)
    weight = np.zeros(length - 1)
    ids[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
    at = 2 * pairs + 2 * gaps(rng, pairs, room)
    ids[at], ids[at + 1] = keys, values
    weight[at + 1] = ANSWER
    return stack((ids.astype(np.int32), weight.astype(np.float32)))


def _text(rng: np.random.Generator, source: Source, length: int, pairs: int) -> Row | None:
    words = distinct(rng, source, 2 * pairs)
    if len(words) < 2 * pairs:
        return None
    keys, values = words[:pairs], words[pairs:]
    front = join(source, [(pair_lines(keys, values), HAYSTACK)])
    questions = [
        join(source, [(f"\n{k} ->", TAIL), (f" {v}", ANSWER), ("\n", TAIL)]) for k, v in zip(keys, values)
    ]
    room = length - 1 - len(front[0]) - sum(len(span[0]) for span in questions)
    if room < 2 * pairs:
        return None
    text, ends = book(rng, source, room)
    places = np.sort(gaps(rng, pairs, room))
    spans, done = [front], 0
    for place, i in zip(places, rng.permutation(pairs)):
        # The sentence end at or before the place, if there is one behind the last cut.
        near = int(ends[max(0, int(np.searchsorted(ends, place, side="right")) - 1)])
        cut = near if done <= near <= place else int(place)
        spans += [plain(text[done:cut]), questions[i]]
        done = cut
    return stack(*spans, plain(text[done:]))
