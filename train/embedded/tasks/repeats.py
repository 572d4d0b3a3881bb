"""Prose with repeats: sentences, clauses and passages come again, word for word, at any distance.

Three kinds: spans of a text stand in it a second (or third) time behind a later sentence; a refrain returns
after every few sentences; paragraphs of one book follow in random order, some of them twice. Tokens of a
repeat behind its first three have the weight of a copy: the first ones cannot be predicted.
Fits from 128 tokens on.
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.tasks.words import pick
from train.embedded.tasks.pieces import Row, plain, stack, window
from train.rows import ANSWER, TEXT, Source

FITS = 128
COPY = 2.0
FREE = 3
"""Tokens of a repeat that cannot be predicted."""


def row(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """One row of a random kind."""
    return (_spans, _spans, _refrain, _paragraphs)[int(rng.integers(4))](rng, source, length - 1)


def _again(ids: np.ndarray) -> Row:
    weight = np.full(len(ids), COPY, np.float32)
    weight[:FREE] = TEXT
    return ids, weight


def _sentences(source: Source, text: np.ndarray) -> list[np.ndarray]:
    """The text cut behind its sentences' ends; sentences of under five tokens stay with the next."""
    ends = np.flatnonzero(source.is_end[text]) + 1
    cuts, last = [], 0
    for end in ends.tolist():
        if end - last >= 5:
            cuts.append(end)
            last = end
    return [part for part in np.split(text, cuts) if len(part)]


def _whole(length: int, spans: list[Row]) -> Row | None:
    """The spans behind each other, cut to the length."""
    if sum(len(ids) for ids, _ in spans) < length:
        return None
    ids, weight = stack(*spans)
    return ids[: length + 1], weight[: length + 1]


def _spans(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """Sentences of a text, or pieces of them, behind later ones."""
    parts = _sentences(source, window(rng, source, length))
    share = rng.uniform(0.1, 0.5)
    spans, met = [], []
    for part in parts:
        spans.append(plain(part, TEXT))
        met.append(part)
        if rng.random() < share:
            known = pick(rng, met)
            if rng.random() < 0.3 and len(known) > 12:
                first = int(rng.integers(0, len(known) - 8))
                known = known[first : first + int(rng.integers(8, len(known) - first + 1))]
            spans.append(_again(known[:80]))
    return _whole(length, spans)


def _refrain(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """A line of prose that returns."""
    parts = _sentences(source, window(rng, source, length))
    line = pick(rng, parts)[:60]
    spans, wait = [plain(line, TEXT)], int(rng.integers(1, 5))
    for i, part in enumerate(parts, 1):
        spans.append(plain(part, TEXT))
        if i % wait == 0:
            spans.append(_again(line))
            wait = int(rng.integers(1, 5))
    return _whole(length, spans)


def _paragraphs(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """Passages of one book, each once or twice, in random order."""
    size = int(rng.integers(24, max(25, min(200, length // 3))))
    parts = [window(rng, source, size) for _ in range(length // size + 1)]
    order = [i for i in range(len(parts)) for _ in range(1 + (rng.random() < 0.6))]
    met: set[int] = set()
    spans = []
    for i in rng.permutation(order).tolist():
        spans.append(_again(parts[i]) if i in met else plain(parts[i], TEXT))
        met.add(i)
    return _whole(length, spans)


def repeated(
    rng: np.random.Generator, source: Source, length: int, *, least: int = 8, most: int = 40
) -> Row | None:
    """For measuring: prose with one of its sentences again at the end.

    The weight is ``ANSWER`` on the repeat's tokens behind its first three, else TEXT.
    """
    text = window(rng, source, length - 1)
    parts = _sentences(source, text)
    fit = [i for i, part in enumerate(parts[:-1]) if least <= len(part) <= most]
    if not fit:
        return None
    chosen = parts[pick(rng, fit)]
    room = length - 1 - len(chosen)
    cut = np.cumsum([len(part) for part in parts])
    behind = cut[cut <= room]
    start = np.flatnonzero([part is chosen for part in parts])[0]
    if not len(behind) or behind[-1] < cut[start]:
        return None
    # Kept to the end of a sentence; what is cut off goes in front, so that the row has its length.
    lead = room - int(behind[-1])
    ids, weight = stack(
        plain(window(rng, source, lead) if lead else text[:0], TEXT),
        plain(text[: behind[-1]], TEXT),
        plain(chosen, TEXT),
    )
    weight[len(ids) - len(chosen) + FREE :] = ANSWER
    return ids, weight
