"""Parts of every task's row: weighted text, haystacks with needles, new names.

A row of N tokens begins with BOS and is a pure function of its generator. Pieces of one text are
encoded together, so that the tokens are those an evaluator gets from the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvjax.eval.tasks import words as shared
from kvjax.eval.tasks.words import NOISE as NOISE
from kvjax.eval.tasks.words import pick as pick
from train.rows import HAYSTACK, Source
from train.text import BOS, held_out_word

Row = tuple[np.ndarray, np.ndarray]
"""(ids int32 [N], loss weight float32 [N])"""
Part = tuple[str, float]
"""(text, loss weight of its tokens)"""
RowFn = Callable[[np.random.Generator, Source, int], Row | None]
"""(rng, source, N) to a row of exactly N tokens; None when this draw does not fit."""


def join(source: Source, parts: Sequence[Part]) -> Row:
    """Encodes the parts as one text; a token has the weight of the part that holds its last character."""
    encoding = source.tokenizer.encode("".join(text for text, _ in parts))
    ends = np.cumsum([len(text) for text, _ in parts])
    part = np.searchsorted(ends, [stop for _, stop in encoding.offsets])
    weights = np.asarray([weight for _, weight in parts], np.float32)
    return np.asarray(encoding.ids, np.int32), weights[part]


def plain(ids: Sequence[int] | np.ndarray, weight: float = HAYSTACK) -> Row:
    """Ids with one weight."""
    return np.asarray(ids, np.int32), np.full(len(ids), weight, np.float32)


def chain(*spans: Row) -> Row:
    """The spans behind each other."""
    ids, weights = zip(*spans)
    return np.concatenate(ids), np.concatenate(weights)


def stack(*spans: Row) -> Row:
    """BOS and the spans behind each other: a row."""
    return chain(plain([BOS]), *spans)


def window(rng: np.random.Generator, source: Source, room: int) -> np.ndarray:
    """``room`` consecutive ids of the source's text, from a sentence's end on."""
    start = _start(rng, source, room)
    return source.text[start : start + room]


def _start(rng: np.random.Generator, source: Source, room: int) -> int:
    """Where a window of ``room`` ids may begin: behind a sentence, or anywhere if no sentence is in reach."""
    last = len(source.text) - room
    count = int(np.searchsorted(source.ends, last, side="right"))
    return int(source.ends[rng.integers(count)]) if count else int(rng.integers(last + 1))


def framed(rng: np.random.Generator, source: Source, length: int, parts: Sequence[Part]) -> Row | None:
    """The parts as a row; plain text fills it, in one half of the draws in front, else behind."""
    if rng.random() < 0.5:
        ids, weight = join(source, [("\n\n", HAYSTACK), *parts])
        order = slice(None, None, -1)
    else:
        ids, weight = join(source, [*parts, ("\n\n", HAYSTACK)])
        order = slice(None)
    room = length - 1 - len(ids)
    if room < 0:
        return None
    return stack(*[(ids, weight), plain(window(rng, source, room))][order])


def book(rng: np.random.Generator, source: Source, room: int) -> tuple[np.ndarray, np.ndarray]:
    """(``room`` ids of text, the sorted positions in it where a sentence has ended)."""
    start = _start(rng, source, room)
    first, last = np.searchsorted(source.ends, [start, start + room + 1])
    ends = source.ends[first:last] - start
    return source.text[start : start + room], ends if len(ends) else np.array([0, room])


def noise(source: Source, room: int) -> tuple[np.ndarray, np.ndarray]:
    """(``room`` ids of ``NOISE`` lines, where lines begin); the first line is cut to fit."""
    line = source.encode("\n" + NOISE)
    return _cut_front([line] * (room // len(line) + 1), room)


def lines(source: Source, texts: Sequence[str], room: int) -> tuple[np.ndarray, np.ndarray]:
    """(the last ``room`` ids of these lines, where lines begin); the texts must be long enough."""
    return _cut_front([e.ids for e in source.tokenizer.encode_batch(["\n" + text for text in texts])], room)


def _cut_front(pieces: Sequence[Sequence[int]], room: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    cut = len(ids) - room
    begins = np.cumsum([0, *map(len, pieces)]) - cut
    return ids[cut:], begins[begins >= 0]


def scatter(
    rng: np.random.Generator, hay: tuple[np.ndarray, np.ndarray], pieces: Sequence[Sequence[int]]
) -> np.ndarray:
    """The haystack's ids with the pieces, in their order, at random ones of its places.

    Places are distinct where there are enough of them.
    """
    ids, places = hay
    cuts = np.sort(rng.choice(places, len(pieces), replace=len(places) < len(pieces)))
    out: list[np.ndarray] = []
    for begin, cut, piece in zip([0, *cuts], cuts, pieces):
        out += [ids[begin:cut], np.asarray(piece, np.int32)]
    return np.concatenate([*out, ids[cuts[-1] if len(cuts) else 0 :]])


def held_out(source: Source) -> bool:
    """Whether the source's key words are those of evaluation."""
    return held_out_word((source.short or source.long)[0])


def distinct(
    rng: np.random.Generator, source: Source, count: int, *, words: int = 1, without: Collection[str] = ()
) -> list[str]:
    """``count`` different keys of ``words`` key words, none of ``without``; fewer if they run out."""
    keys: dict[str, None] = {}
    for _ in range(8 + 4 * count):
        if len(keys) == count:
            break
        key = "-".join(source.word(rng) for _ in range(words))
        if key not in without:
            keys[key] = None
    return list(keys)


def strings(rng: np.random.Generator, source: Source, count: int, size: int, letters: str) -> list[str]:
    """``count`` different random strings of ``size`` letters, of the split that the source belongs to."""
    return shared.strings(rng, count, size, letters, held_out=held_out(source))
