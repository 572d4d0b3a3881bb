"""Recall of pairs: MQAR as text (https://arxiv.org/abs/2312.04927), and of a JSON object (HELMET's json_kv).

mqar: word pairs in front, book text behind them up to half of the length; then, teacher-forced, more
text in which each key comes once more at a gap drawn from p(g) ~ g^(a-1), a = 0.01 (most soon, some very
late). A value counts when all its tokens are the likeliest; ``gap`` is its distance in tokens, about.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.maker import Maker, Piece, join
from kvjax.eval.tasks.sample import Sample
from kvjax.eval.tasks.task import Task
from kvjax.eval.tasks.words import Rng

EXPONENT = 0.01
PAIRS = 64
"""Tokens of length a pair."""
JSON_TASK = "Remember the pairs of this JSON object."


def gaps(rng: Rng, count: int, room: int) -> np.ndarray:
    """``count`` different gaps in [0, room), by the power law."""
    chance = np.arange(1, room + 1) ** (EXPONENT - 1)
    return rng.choice(room, count, replace=False, p=chance / chance.sum())


def pair_lines(keys: Sequence[str], values: Sequence[str]) -> str:
    """A pair a line."""
    return "\n".join(f"{k} -> {v}" for k, v in zip(keys, values))


def mqar(rng: Rng, maker: Maker) -> Sample:
    """One sample."""
    count = max(2, maker.length // PAIRS)
    words = maker.words(rng, 2 * count)
    keys, values = words[:count], words[count:]
    front = pair_lines(keys, values)
    places = np.sort(gaps(rng, count, maker.length)) / maker.length
    order = rng.permutation(count).tolist()
    text = maker.window(rng, maker.data.essays())

    def build(units: int) -> Sample:
        half = units // 2
        context = f"{front}\n{' '.join(text[:half])}"
        behind = text[half:units]
        pieces: list[Piece] = []
        cuts = [int(place * (len(behind) + 1)) for place in places]
        for i in range(len(behind) + 1):
            for cut, pair in zip(cuts, order):
                if cut == i:
                    pieces += [(f"\n{keys[pair]} ->", False), (f" {values[pair]}", True), ("\n", False)]
            if i < len(behind):
                pieces += [(" " + behind[i], False)]
        answer, scored = join(pieces)
        base = maker.count(context)
        mean = maker.count(answer) / max(1, len(behind) + 1)
        return Sample(
            context=context,
            answer=answer,
            spans=((0, len(front)),),
            scored=scored,
            tags={"gap": [round(base + cut * mean) for cut in cuts]},
        )

    return maker.fit(build, len(text), least=2)


def json_kv(rng: Rng, maker: Maker) -> Sample:
    """One sample: as many pairs as fit, one of them asked for."""
    most = min(len(maker.key_words()), maker.length // 10)
    keys = maker.words(rng, most)
    values = rng.integers(10_000, 100_000, most).tolist()
    where = rng.random()

    def build(count: int) -> Sample:
        wanted = int(where * count)
        pieces: list[Piece] = [(JSON_TASK + "\n{", False)]
        for i in range(count):
            pieces += [(", " if i else "", False), (f"{json.dumps(keys[i])}: {values[i]}", i == wanted)]
        return maker.sample(
            join([*pieces, ("}", False)]),
            f'\nThe value of "{keys[wanted]}"',
            " is",
            f" {values[wanted]}",
            (str(values[wanted]),),
            max_new=10,
            tags={"depth_from_end": round(100 * (1 - where))},
        )

    return maker.fit(build, most, least=2)


TASKS = (
    Task(name="mqar", group="mqar", fits=256, make=mqar, metric="recall", asks=False),
    Task(name="json_kv", group="mqar", fits=128, make=json_kv, score=scorers.all_found),
)
