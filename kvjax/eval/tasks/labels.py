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
from collections.abc import Callable

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.data import Data, held_out_word
from kvjax.eval.tasks.maker import Maker, Piece, Rng, join, pick, shuffled
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task

BANKING, CLINC = "icl/banking77_test.csv.gz", "icl/clinc150_full.json.gz"
TEMPLATES = (
    "The {} stands beside the {}.",
    "They found a {} and one {}.",
    "Nobody saw the {} near that {}.",
    "She bought some {} for her {}.",
    "A {} is more than a {}.",
)
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
SHOT = 24
"""Tokens of a demonstration, about; for how many to draw."""

Texts = Callable[[Rng, Maker, int, int], list[list[str]]]
"""(rng, maker, classes, rounds) to the texts of each class, one a round and the question's at the end."""


def make(texts: Texts, rng: Rng, maker: Maker) -> Sample:
    """One sample: 4 classes at 512 tokens, 8 at 1024, 16 from 2048 on."""
    classes = min(16, max(4, maker.length // 128))
    rounds = max(2, maker.length // (SHOT * classes) + 2)
    said = texts(rng, maker, classes, rounds)
    rounds = min(rounds, *(len(mine) - 1 for mine in said))
    alphabet = DIGITS if classes <= 10 and rng.random() < 0.5 else LETTERS
    names = shuffled(rng, alphabet)[:classes]
    order = [shuffled(rng, range(classes)) for _ in range(rounds)]
    asked = int(rng.integers(classes))

    def build(count: int) -> Sample:
        pieces: list[Piece] = []
        # Rounds are cut at the front, so that the last ones are whole.
        shots = (
            [(label, said[label][r]) for r in range(rounds) for label in order[r]][-count:] if count else []
        )
        for label, text in shots:
            pieces += [
                ("\n\n" if pieces else "", False),
                (f"text: {text}\nlabel: {names[label]}", label == asked),
            ]
        context, spans = join(pieces)
        return Sample(
            context=context or "\n",
            question=f"\n\ntext: {said[asked][-1]}",
            prefix="\nlabel:",
            answer=f" {names[asked]}",
            refs=(names[asked],),
            spans=spans,
            labels=tuple(f" {name}" for name in names),
            max_new=3,
        )

    return maker.fit(build, classes * rounds, least=classes)


def made(rng: Rng, maker: Maker, classes: int, rounds: int) -> list[list[str]]:
    """Texts from templates: the class's word and one that stands nowhere else."""
    pool = len(maker.key_words())
    rounds = min(rounds, (pool - classes) // classes - 1)
    words = maker.words(rng, classes * (rounds + 2))
    marks, others = words[:classes], iter(words[classes:])

    def text(mark: str) -> str:
        pair = (mark, next(others)) if rng.random() < 0.5 else (next(others), mark)
        return pick(rng, TEMPLATES).format(*pair)

    return [[text(mark) for _ in range(rounds + 1)] for mark in marks]


@functools.cache
def _intents(data: Data, name: str) -> dict[str, tuple[str, ...]]:
    """Test texts by intent, of the evaluation's fifth of the intents."""
    if name == BANKING:
        pairs = [
            (said, intent) for said, intent in list(csv.reader(io.StringIO(data.raw(name).decode())))[1:]
        ]
    else:
        pairs = [(said, intent) for said, intent in json.loads(data.raw(name))["test"]]
    found: dict[str, list[str]] = {}
    for said, intent in pairs:
        if held_out_word(intent):
            found.setdefault(intent, []).append(" ".join(said.split()))
    return {intent: tuple(said) for intent, said in found.items()}


def real(name: str, rng: Rng, maker: Maker, classes: int, rounds: int) -> list[list[str]]:
    """Texts of random intents."""
    intents = _intents(maker.data, name)
    chosen = shuffled(rng, sorted(intents))[:classes]
    return [shuffled(rng, intents[intent])[: rounds + 1] for intent in chosen]


def score(output: str, sample: Sample) -> float:
    """1 if the label, and nothing else, was written first."""
    return scorers.exact(output.strip()[:1], sample.refs[0])


def _task(name: str, texts: Texts, needs: tuple[str, ...] = ()) -> Task:
    fits = 512 if needs else 256
    make_ = functools.partial(make, texts)
    return Task(name=name, group="icl", fits=fits, make=make_, score=score, needs=needs)


TASKS = (
    _task("icl_synth", made),
    _task("icl_banking77", functools.partial(real, BANKING), (BANKING,)),
    _task("icl_clinc", functools.partial(real, CLINC), (CLINC,)),
)
