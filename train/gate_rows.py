"""Batches for gates: the embedded model's mixture of rows, or documents behind an instruction.

Batch i is a pure function of (seed, i), as in ``train.data``, so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain.python as grain
import numpy as np

from train import data, text
from train.gate_settings import ConfigError, Settings
from train.rows import Source
from train.setup import sources

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD = 20
"""One document in so many is kept for checks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supply:
    """What a run reads.

    Attributes:
      train: batches, dicts whose ``tokens`` are int32 [B, T].
      check: by length, tokens int32 [n, T] of rows that training never sees.
      held: text and key words for recall; None where the data are documents.
    """

    train: grain.MapDataset
    check: dict[int, np.ndarray]
    held: Source | None


TEXT = "text"
"""The file in a run's folder that says of which text its rows are."""


def remember(settings: Settings) -> str:
    """Which text a run reads, kept with its checkpoints: "books", "stand-in" (``train.text``) or "documents".

    Raises:
      ConfigError: the run began with another, so that it cannot go on as it would have.
    """
    books = "stand-in" if text.data_folder() is None else "books"
    now, file = "documents" if settings.data["kind"] == "documents" else books, settings.folder / TEXT
    if file.is_file() and (then := file.read_text().strip()) != now:
        raise ConfigError(
            f"{settings.folder} began with the text {then!r}; here is {now!r}. Set KVJAX_DATA as it was "
            "then, or give the config another folder."
        )
    settings.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(now + "\n")
    return now


def remembered(settings: Settings) -> str:
    """What ``remember`` kept of a run, or "unknown"."""
    file = settings.folder / TEXT
    return file.read_text().strip() if file.is_file() else "unknown"


def supply(settings: Settings, folder: Path) -> Supply:
    """The data of a config, for the tokenizer of the model in ``folder``.

    Raises:
      ConfigError: no documents, or none long enough.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    make = _documents if settings.data["kind"] == "documents" else _rows
    return make(settings, tokenizer)


_KEYS = ("kinds", "keys", "needles", "tasks", "copies", "magic", "bridge", "clash", "families")


def _rows(settings: Settings, tokenizer: Tokenizer) -> Supply:
    given, asked = settings.data, settings.check
    corpus = text.corpus(text.data_folder(), seed=settings.seed)
    train, held, _ = sources(corpus, tokenizer, settings.folder.parents[1] / "cache")
    chosen: dict[str, Any] = {
        name: tuple(given[name]) if isinstance(given[name], list) else given[name]
        for name in _KEYS
        if name in given
    }
    try:
        level = data.Level(
            lengths=tuple(given["lengths"]),
            shares=tuple(given["shares"]),
            scored=given.get("scored", 64),
            **chosen,
        )
    except ValueError as reason:
        raise ConfigError(f"data.kinds: {reason}") from reason
    mix = data.Mix(seed=settings.seed, tokens=given["tokens"], levels=(level,))

    def rows(length: int) -> np.ndarray:
        rng = np.random.default_rng((settings.seed, 1, length))
        drawn = (data.training_row(rng, held, length, level)[0] for _ in range(asked["rows"]))
        return np.stack(list(drawn))

    return Supply(
        train=data.batches(train, mix, 0, settings.plan.steps),
        check={length: rows(length) for length in asked["lengths"]},
        held=held,
    )


def read_documents(folder: Path) -> Iterator[str]:
    """Texts of a folder in the order of names: .jsonl(.gz) with a ``text`` a line, .txt(.gz) whole."""
    for path in sorted(folder.rglob("*")):
        kind = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
        if not path.is_file() or kind not in ("jsonl", "txt"):
            continue
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            if kind == "txt":
                yield file.read()
            else:
                yield from (json.loads(line)["text"] for line in file)


def encoded(tokenizer: Tokenizer, texts: Iterator[str], at_once: int = 64) -> Iterator[np.ndarray]:
    """Ids of each text, few at a time: what the tokenizer returns is a hundred times larger than ids."""
    while part := list(itertools.islice(texts, at_once)):
        yield from (
            np.asarray(one.ids, np.int32) for one in tokenizer.encode_batch(part, add_special_tokens=False)
        )


class Documents:
    """Random-access batches of documents cut to one length, each behind the instruction (a grain source)."""

    def __init__(self, texts: list[np.ndarray], head: np.ndarray, settings: Settings, count: int):
        self.texts, self.head, self.settings, self.count = texts, head, settings, count
        self.sizes = np.asarray([len(ids) for ids in texts])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        given = self.settings.data
        rng = np.random.default_rng((self.settings.seed, int(index)))
        shares = np.asarray(given["shares"], float)
        length = int(rng.choice(given["lengths"], p=shares / shares.sum()))
        return {"tokens": self.draw(rng, length, max(1, given["tokens"] // length))}

    def draw(self, rng: np.random.Generator, length: int, count: int) -> np.ndarray:
        """``count`` rows of ``length`` tokens, each a random document of at least that many."""
        long = np.flatnonzero(self.sizes + len(self.head) >= length)
        chosen = rng.choice(long, count)
        return np.stack([np.concatenate([self.head, self.texts[i]])[:length] for i in chosen]).astype(
            np.int32
        )

    def refuse_short(self, folder: Path) -> None:
        """Raises ConfigError where a length has no document."""
        for length in {*self.settings.data["lengths"], *self.settings.check["lengths"]}:
            if not np.any(self.sizes + len(self.head) >= length):
                raise ConfigError(
                    f"data.lengths: {length} tokens, but no document of {folder} is as long. Give longer "
                    "documents or shorter lengths."
                )


def _documents(settings: Settings, tokenizer: Tokenizer) -> Supply:
    given, asked = settings.data, settings.check
    folder = Path(given["folder"])
    if not folder.is_dir():
        raise ConfigError(
            f"data.folder: {folder} is not there. Put .jsonl or .txt files of documents into it."
        )
    least = min(given["lengths"]) // 8  # of characters: a text this short has no chance
    ids = list(encoded(tokenizer, (text for text in read_documents(folder) if len(text) >= least)))
    # The head keeps the tokenizer's own beginning of text.
    head = np.asarray(tokenizer.encode(given["instruction"]).ids, np.int32)
    train = Documents([x for i, x in enumerate(ids) if i % HELD], head, settings, settings.plan.steps)
    held = Documents([x for i, x in enumerate(ids) if not i % HELD], head, settings, 1)
    train.refuse_short(folder)
    held.refuse_short(folder)
    rng = np.random.default_rng((settings.seed, 1))
    check = {length: held.draw(rng, length, asked["rows"]) for length in asked["lengths"]}
    return Supply(train=grain.MapDataset.source(train), check=check, held=None)
