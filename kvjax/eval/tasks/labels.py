"""Many-shot in-context learning (after HELMET, https://arxiv.org/abs/2410.02694): which label has a text?

Demonstrations in rounds, each class once a round in random order; labels are letters or digits, new in
every sample. icl_synth: a class is one hidden word that stands in all its texts. icl_banking77 and
icl_clinc: intents that training leaves to evaluation (every fifth by checksum), test texts.
"""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Iterable

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data
from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import CAPITALS, DECIMAL, Rng, held_out_word, pick, shuffled

BANKING, CLINC = "icl/banking77_test.csv.gz", "icl/clinc150_full.json.gz"
TEMPLATES = (
    "The {} stands beside the {}.",
    "They found a {} and one {}.",
    "Nobody saw the {} near that {}.",
    "She bought some {} for her {}.",
    "A {} is more than a {}.",
)
SHOT = 24
"""Tokens of a demonstration, about; for how many to draw."""

Texts = Callable[[Rng, Maker, int, int], list[list[str]]]
"""(rng, maker, classes, rounds) to the texts of each class, one a round and the question's at the end."""


def make(texts_of: Texts, rng: Rng, maker: Maker) -> Sample:
    """One sample: 4 classes at 512 tokens, 8 at 1024, 16 from 2048 on, or all that there are."""
    classes = min(16, max(4, maker.length // 128))
    rounds = max(2, maker.length // (SHOT * classes) + 2)
    texts = texts_of(rng, maker, classes, rounds)
    classes = len(texts)  # a data set may have fewer
    rounds = min(rounds, *(len(own) - 1 for own in texts))
    names = shuffled(rng, DECIMAL if classes <= 10 and rng.random() < 0.5 else CAPITALS)[:classes]
    order = [shuffled(rng, range(classes)) for _ in range(rounds)]
    wanted = int(rng.integers(classes))

    def build(count: int) -> Sample:
        # Rounds are cut at the front, so that the last ones are whole.
        shots = [(label, texts[label][r]) for r in range(rounds) for label in order[r]]
        pieces: list[Piece] = []
        for label, text in shots[len(shots) - count :]:
            pieces += [("\n\n" if pieces else "", False)]
            pieces += [(f"text: {text}\nlabel: {names[label]}", label == wanted)]
        return maker.sample(
            join(pieces),
            f"\n\ntext: {texts[wanted][-1]}",
            "\nlabel:",
            f" {names[wanted]}",
            (names[wanted],),
            labels=tuple(f" {name}" for name in names),
            max_new=3,
        )

    return maker.fit(build, classes * rounds, least=classes)


def generated(rng: Rng, maker: Maker, classes: int, rounds: int) -> list[list[str]]:
    """Texts from templates: the class's word and one that stands nowhere else."""
    pool = len(maker.key_words())
    rounds = min(rounds, (pool - classes) // classes - 1)
    words = maker.words(rng, classes * (rounds + 2))
    marks, others = words[:classes], iter(words[classes:])

    def text(mark: str) -> str:
        pair = (mark, next(others)) if rng.random() < 0.5 else (next(others), mark)
        return pick(rng, TEMPLATES).format(*pair)

    return [[text(mark) for _ in range(rounds + 1)] for mark in marks]


def banking(raw: bytes) -> list[tuple[str, str]]:
    """(text, intent) pairs of a file of Banking77."""
    return [(text, intent) for text, intent in list(csv.reader(io.StringIO(raw.decode())))[1:]]


def by_intent(pairs: Iterable[tuple[str, str]], *, held_out: bool) -> dict[str, tuple[str, ...]]:
    """Texts by intent, of evaluation's fifth of the intents or of the others."""
    texts: dict[str, list[str]] = {}
    for text, intent in pairs:
        if held_out_word(intent) == held_out:
            texts.setdefault(intent, []).append(" ".join(text.split()))
    return {intent: tuple(own) for intent, own in texts.items()}


@functools.cache
def _intents(data: Data, name: str) -> dict[str, tuple[str, ...]]:
    raw = data.raw(name)
    return by_intent(banking(raw) if name == BANKING else json.loads(raw)["test"], held_out=True)


def real(name: str, rng: Rng, maker: Maker, classes: int, rounds: int) -> list[list[str]]:
    """Test texts of random intents."""
    intents = _intents(maker.data, name)
    chosen = shuffled(rng, sorted(intents))[:classes]
    return [shuffled(rng, intents[intent])[: rounds + 1] for intent in chosen]


TASKS = tuple(
    Task(
        name=name,
        group="icl",
        fits=512 if needs else 256,
        make=functools.partial(make, texts_of),
        score=scorers.first_letter,
        needs=needs,
    )
    for name, texts_of, needs in (
        ("icl_synth", generated, ()),
        ("icl_banking77", functools.partial(real, BANKING), (BANKING,)),
        ("icl_clinc", functools.partial(real, CLINC), (CLINC,)),
    )
)
