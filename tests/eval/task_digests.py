"""Digests of the samples of every task, of evaluation and of training: refactoring must not change them.

python tests/eval/task_digests.py  # rewrites tests/golden/tasks.json; only when samples may change

By world, text, task and length the file holds two digests: of the first 5 samples and of 100. A digest is the
first sixteen hex digits of a SHA-256. "pack" texts need the data pack (KVJAX_DATA), "twin" texts are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval import tasks as evaluation
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import runner
from kvjax.eval.tasks import data
from kvjax.loading import LanguageModel, load
from train import rows, text
from train.embedded import tasks as training
from train.embedded.tasks import (
    associations,
    facts,
    labels,
    logs,
    niah,
    pairs,
    repeats,
    stories,
    tracking,
    words,
)

FILE = Path(__file__).parents[1] / "golden" / "tasks.json"
LENGTHS = (512, 1024, 2048)
COUNTS = (5, 100)
TEXTS = ("twin", "pack")

FORMS = {
    **{f"niah {form}": functools.partial(niah.row, form=form, full=True) for form in niah.FORMS},
    **{f"stories {kind}": functools.partial(stories.row, kind=kind) for kind in range(1, 6)},
    "cwe full": functools.partial(words.cwe, full=True),
    "tracking full": functools.partial(tracking.row, hops=4, example=True, second=True),
    "labels 5": functools.partial(labels.row, classes=5),
    "pairs text": functools.partial(pairs.row, form="text"),
    "pairs token": functools.partial(pairs.row, form="token"),
    "associations 9": functools.partial(associations.row, pairs=9, questions=3),
    "facts": facts.row,
    "sentence": facts.sentence,
    "logs": logs.row,
    "repeats": repeats.row,
    "repeated": repeats.repeated,
}
"""What other programs draw besides ``train.embedded.tasks.TASKS``."""
ROWS = {**training.TASKS, **FORMS}


@functools.cache
def embedded() -> LanguageModel:
    return load()


def pack() -> Path | None:
    return data.find().folder


def fingerprint(folder: Path) -> str:
    """Of the data pack: digests of another one are others."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def texts_of(kind: str) -> Iterator[None]:
    """KVJAX_DATA for the twin or the pack."""
    before, folder = os.environ.get("KVJAX_DATA"), pack()
    os.environ["KVJAX_DATA"] = str(folder) if kind == "pack" else "/nowhere"
    try:
        yield
    finally:
        os.environ.pop("KVJAX_DATA")
        if before is not None:
            os.environ["KVJAX_DATA"] = before


@functools.cache
def source(held_out: bool) -> rows.Source:
    tokenizer, corpus = embedded().text.tokenizer, text.corpus(None)
    return rows.make_source(
        tokenizer, text.token_array(tokenizer, corpus.train), corpus.words, held_out=held_out
    )


def of_evaluation(name: str, kind: str, length: int, count: int) -> str:
    """Of a task's first samples, or why there are none."""
    texts = data.Data(None if kind == "twin" else pack())
    digest = hashlib.sha256()
    try:
        drawn = runner.draw(evaluation.tasks()[name], embedded(), texts, length=length, seed=0, count=count)
    except EvalError as error:
        return type(error).__name__
    for sample, encoded in drawn:
        tree = dataclasses.asdict(sample) | {"encoded": dataclasses.asdict(encoded)}
        digest.update(json.dumps(tree, sort_keys=True, default=lambda array: array.tolist()).encode())
    return digest.hexdigest()[:16]


def of_training(name: str, kind: str, length: int, count: int) -> str:
    """Of rows of both splits, half and half; a row that does not fit counts as None."""
    digest = hashlib.sha256()
    with texts_of(kind):
        for held_out, seeds in ((False, range(-(-count // 2))), (True, range(count // 2))):
            for seed in seeds:
                row = ROWS[name](np.random.default_rng(seed), source(held_out), length)
                for array in (np.zeros(0),) if row is None else row:
                    digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def of_texts(name: str, count: int) -> str:
    """Of the texts that a tokenizer is trained on besides books."""
    make = {"facts": facts.samples, "logs": logs.samples}[name]
    texts = make(np.random.default_rng(0), source(False).short, count)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


WORLDS: dict[str, tuple[Callable[[str, str, int, int], str], tuple[str, ...]]] = {
    "evaluation": (of_evaluation, tuple(evaluation.tasks())),
    "training": (of_training, tuple(ROWS)),
}


def everything() -> dict[str, Any]:
    """What the file holds."""
    tree: dict[str, Any] = {"pack": fingerprint(pack() or Path())}
    tree["texts"] = {name: [of_texts(name, count) for count in COUNTS] for name in ("facts", "logs")}
    for world, (of, names) in WORLDS.items():
        for kind in TEXTS:
            for name in names:
                print(world, kind, name, flush=True)
                digests = {length: [of(name, kind, length, count) for count in COUNTS] for length in LENGTHS}
                tree.setdefault(world, {}).setdefault(kind, {})[name] = digests
    return tree


if __name__ == "__main__":
    lines = json.dumps(everything(), indent=1)
    # One line a task.
    FILE.write_text(re.sub(r"\n {4,}|\n {3,}(?=[\]}])", "", lines) + "\n")
