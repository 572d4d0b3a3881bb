"""Many-shot labels: learn from the prompt which label a class has (HELMET's ICL, arXiv 2410.02694).

4 to 16 classes; their labels are random letters or digits, new in every row. Demonstrations come in
rounds, each class once a round in random order: "text: ...", "label: k". In generated rows a class is
one to three hidden key words, one of them in each of its texts; all other key words of the row stand
in it once, so that the repeated word tells the label. From the second round on every label whose
class word was shown before is an answer, so is the last label, which is the evaluation's question.

Training rows are, half of the draws, of Banking77 or CLINC150 (training parts, CC BY 4.0 and 3.0)
where ``text.data_folder`` has them: intents as classes, every label from the second round on an
answer. Every fifth intent, by checksum, is left to evaluation, as key words are; a held-out source
never reads these files.
Fits from 256 tokens on.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import numpy as np

from kvjax.eval.tasks.labels import TEMPLATES, banking, by_intent
from kvjax.eval.tasks.words import CAPITALS, DECIMAL, pick, shuffled
from train import text
from train.embedded.tasks.pieces import Part, Row, distinct, framed, held_out
from train.rows import ANSWER, HAYSTACK, TAIL, Source

FITS = 256

TEMPLATE_WORDS = frozenset(" ".join(TEMPLATES).lower().replace(".", "").split()) | {"text", "label"}
REAL_SHARE = 0.5

Shot = tuple[str, int, bool]
"""(text, class, whether its label can be known)"""


def row(
    rng: np.random.Generator,
    source: Source,
    length: int,
    *,
    classes: int | None = None,
    real: bool | None = None,
) -> Row | None:
    """One row of as many classes as can have two rounds; ``real`` asks for intents of real data sets."""
    if classes is None and length >= 384:
        classes = int(rng.integers(4, max(5, min(16, length // 80) + 1)))
    elif classes is None:
        classes = int(rng.integers(3, 5))
    folder = None if held_out(source) else text.data_folder()
    drawn = rng.random() < REAL_SHARE
    sets = intents(folder) if folder is not None and (drawn if real is None else real) else ()
    alphabet = DECIMAL if classes <= 10 and rng.random() < 0.5 else CAPITALS
    names = shuffled(rng, alphabet)[:classes]
    rounds = max(2, length // (20 * classes))
    shots = _real(rng, pick(rng, sets), classes, rounds) if sets else _generated(rng, source, classes, rounds)
    encoded = [len(source.encode(f"\ntext: {shot}\nlabel: {names[label]}")) + 1 for shot, label, _ in shots]
    fitting = int(np.searchsorted(np.cumsum(encoded), length - 8, side="right"))
    ends = [i for i, (_, _, known) in enumerate(shots[:fitting], 1) if known]
    if not ends:
        return None
    last = ends[-1] if rng.random() < 0.6 else pick(rng, ends)
    parts: list[Part] = []
    for i, (shot, label, known) in enumerate(shots[:last]):
        gap = "\n\n" if i else ""
        parts += [(f"{gap}text: {shot}\nlabel:", TAIL if known else HAYSTACK)]
        parts += [(f" {names[label]}", ANSWER if known else HAYSTACK)]
    return framed(rng, source, length, parts)


def _generated(rng: np.random.Generator, source: Source, classes: int, rounds: int) -> list[Shot]:
    """Demonstrations from templates; ends early when key words run out."""
    each = int(rng.integers(1, 4)) if rounds > 3 else 1
    words = distinct(rng, source, classes * (each + rounds), without=TEMPLATE_WORDS)
    marks, others = words[: classes * each], iter(words[classes * each :])
    shown: set[str] = set()
    shots: list[Shot] = []
    for _ in range(rounds):
        for label in rng.permutation(classes):
            mark = marks[int(label) * each + int(rng.integers(each))]
            other = next(others, None)
            if other is None:
                return shots
            pair = (mark, other) if rng.random() < 0.5 else (other, mark)
            shots.append((pick(rng, TEMPLATES).format(*pair), int(label), mark in shown))
            shown.add(mark)
    return shots


def _real(
    rng: np.random.Generator, texts: dict[str, tuple[str, ...]], classes: int, rounds: int
) -> list[Shot]:
    """Demonstrations of random intents."""
    chosen = [texts[name] for name in shuffled(rng, sorted(texts))[:classes]]
    drawn = [shuffled(rng, own)[:rounds] for own in chosen]
    rounds = min(map(len, drawn))
    return [(drawn[label][i], int(label), i > 0) for i in range(rounds) for label in rng.permutation(classes)]


@functools.cache
def intents(folder: Path) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Texts by intent of each training file that is there, without the intents left to evaluation."""

    def raw(name: str) -> bytes | None:
        file = folder / "icl" / name
        return gzip.decompress(file.read_bytes()) if file.exists() else None

    first, second = raw("banking77_train.csv.gz"), raw("clinc150_full.json.gz")
    sets = [banking(first)] if first is not None else []
    sets += [json.loads(second)["train"]] if second is not None else []
    return tuple(by_intent(pairs, held_out=False) for pairs in sets)
