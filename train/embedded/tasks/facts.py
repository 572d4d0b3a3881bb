"""Facts in text, in any of the grammar's wordings: one to eight are hidden, some are asked for at the end.

Facts stand at sentence ends of book text. In seven rows of ten all have the same wording, so that keys
decide; in the others each has its own. Questions repeat the statement or paraphrase it.
Fits from 128 tokens on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks.words import pick
from train.embedded.tasks.pieces import Part, Row, book, held_out, join, plain, scatter, stack
from train.embedded.tasks.values import VALUES, Draw, keys
from train.embedded.tasks.wordings import Wording, grammar, written
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 128
MIXED = 0.3
MOST_ASKED = (8, 16)
"""Most questions of a row: of a short one, and from 1024 tokens on."""
LEAST = 8
"""Fewest tokens of text."""
ECHO = 0.4
"""Share of questions that repeat the statement, where a wording has one."""


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    wording: Wording | None = None,
    hidden: int | None = None,
    paraphrase: bool | None = None,
    questions: int | None = None,
    values: Sequence[str] | None = None,
) -> Row | None:
    """One row.

    Args:
      rng, source, length: as in ``RowFn``; a held-out source draws names, codes and wordings held out, too.
      wording: of every fact; None draws from the grammar.
      hidden: facts in the text; None draws one to eight.
      paraphrase: whether questions differ from the statement.
      questions: how many; None draws up to two for each fact, in different words, as many as fit.
      values: of the facts; None draws values of the wording's type.
    """
    held = held_out(source)
    draw = Draw(rng, lambda: source.word(rng), held)
    if hidden is None:
        counts = (1, 2, 3, 4, 6, 8) if length >= 512 else (1, 2, 3, 4) if length >= 256 else (1, 2)
        hidden = int(rng.choice(counts))
    names = keys(draw, hidden)
    if len(names) < hidden:
        return None
    first = wording or pick(rng, grammar(held))
    mixed = wording is None and rng.random() < MIXED
    each = [pick(rng, grammar(held)) if mixed else first for _ in names]
    if values is None:
        values = [VALUES[one.kind](draw) for one in each]
    facts = [_sentence(one.hide, name, value) for one, name, value in zip(each, names, values)]
    gap = pick(rng, (" ", " ", "\n", "\n\n"))
    spaced = " " if gap == " " else pick(rng, (" ", "\n"))
    needles = [source.encode(spaced + fact) for fact in facts]
    # Few tokens of a row are answers: unless ``questions`` says less, a row asks for as much as fits.
    most = MOST_ASKED[length >= 1024]
    order = np.concatenate([rng.permutation(hidden) for _ in range(most)])
    count = int(rng.integers(1, min(2 * hidden, most) + 1)) if questions is None else questions
    while True:
        parts: list[Part] = []
        for n, i in enumerate(order[:count]):
            ask = _sentence(_question(rng, each[i], paraphrase), names[i], "")
            parts += [(("." if n else "") + gap + ask, TAIL), (f" {values[i]}", ANSWER)]
        tail = join(source, parts)
        room = length - 1 - len(tail[0]) - sum(map(len, needles))
        if room >= LEAST or count == 1 or questions is not None:
            break
        count -= 1
    if room < LEAST:
        return None
    return stack(plain(scatter(rng, book(rng, source, room), needles), HAYSTACK), tail)


def sentence(rng: np.random.Generator, source: Source, length: int) -> Row | None:
    """``row`` in one of the sentences with verbs of their own, which ``row`` rarely draws by itself."""
    held = held_out(source)
    return row(rng, source, length, wording=pick(rng, grammar(True) if held else written("trained")))


def _question(rng: np.random.Generator, wording: Wording, paraphrase: bool | None) -> str:
    if len(wording.ask) == 1:
        return wording.ask[0]
    if paraphrase is None:
        paraphrase = rng.random() >= ECHO
    return pick(rng, wording.ask[1:]) if paraphrase else wording.ask[0]


def _sentence(text: str, key: str, value: str) -> str:
    """The text with both filled in, beginning with a capital."""
    text = text.replace("{k}", key).replace("{v}", value)
    return text[0].upper() + text[1:]


def samples(rng: np.random.Generator, words: tuple[str, ...], count: int) -> list[str]:
    """Facts, each with a question and its answer, as text to train a tokenizer on."""
    draw = Draw(rng, lambda: pick(rng, words), False)
    texts = []
    for _ in range(count):
        wording, key = pick(rng, grammar(False)), keys(draw, 1)[0]
        value = VALUES[wording.kind](draw)
        fact = _sentence(wording.hide, key, value)
        texts.append(f" {fact} {_sentence(_question(rng, wording, None), key, '')} {value}.\n")
    return texts
