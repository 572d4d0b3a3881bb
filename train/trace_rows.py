"""The sequences of which traces are made: tasks, dialogue, books and rows of training, or documents.

They are written with the model's own tokenizer, whichever it is. Sequence i is a pure function of
(seed, split, i), so that a run that was stopped goes on with the same ones. Only the splits that may be
trained on are read; checks have words, books and documents of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train import data, gate_rows, rows, tasks, text
from train.config import ConfigError, number, require
from train.ranker.settings import Settings
from train.setup import sources

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvjax.text import Text

KINDS = ("ruler", "dialogue", "books")
"""Drawn evenly where ``traces.data.mix`` says nothing; it may name ``train.data.KINDS``, too."""

RULER = {"niah": 1.0, "tracking": 1.0, "cwe": 1.0, "fwe": 1.0}
"""Tasks of a "ruler" row, and how often each is drawn."""

Draw = Callable[[np.random.Generator, int], tuple[str, np.ndarray]]
"""(random generator, tokens) to (task, ids)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """What is to be traced.

    Attributes:
      settings: lengths and numbers of sequences.
      train, held: draw a sequence of either split.
    """

    settings: Settings
    train: Draw
    held: Draw

    def length(self, index: int) -> int:
        """Tokens of a sequence."""
        return length(self.settings, index)

    def draw(self, index: int) -> tuple[str, np.ndarray]:
        """(task, ids) of a sequence."""
        tokens, rng = _begun(self.settings, index)
        split = self.train if index < self.settings.recording.sequences else self.held
        return split(rng, tokens)


def length(settings: Settings, index: int) -> int:
    """Tokens of a sequence, without drawing it."""
    return _begun(settings, index)[0]


def _begun(settings: Settings, index: int) -> tuple[int, np.random.Generator]:
    asked = settings.recording
    rng = np.random.default_rng((settings.seed, index >= asked.sequences, index))
    shares = np.asarray(asked.shares, float)
    return int(rng.choice(asked.lengths, p=shares / shares.sum())), rng


def sequences(settings: Settings, written: Text) -> Sequences:
    """The sequences of a config as a model's tokenizer writes them.

    Raises:
      ConfigError: kinds or tasks that do not exist, no documents, or none long enough.
    """
    kind = settings.recording.data.get("kind", "rows")
    train, held = (_documents if kind == "documents" else _rows)(settings, written)
    return Sequences(settings=settings, train=train, held=held)


def bare(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that adds nothing before or behind a text: rows are joined of many pieces."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"post_processor": None}))


def _rows(settings: Settings, written: Text) -> tuple[Draw, Draw]:
    given = settings.recording.data
    mix = given.get("mix", dict.fromkeys(KINDS, 1.0))
    known = (*KINDS, *data.KINDS)
    require(
        bool(mix) and set(mix) <= set(known), "traces.data.mix", mix, f"names others than {', '.join(known)}."
    )
    shares = np.asarray([number(share, "traces.data.mix") for share in mix.values()])
    families = given.get("families", RULER)
    require(
        set(families) <= set(tasks.TASKS),
        "traces.data.families",
        families,
        f"names no task. Tasks are {', '.join(tasks.TASKS)}.",
    )
    corpus = text.corpus(text.data_folder(), seed=settings.seed)
    train, held, books = sources(corpus, bare(written.tokenizer), settings.folder.parent / "cache")
    # Rows begin with a BOS of the embedded model's: here stands the model's own, or nothing.
    spare = int(written.bos is None)

    def drawing(source: rows.Source, plain: rows.Source) -> Draw:
        def draw(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            name, ids = row(rng, tokens + spare)
            if written.bos is not None:
                ids[0] = written.bos
            return name, ids[spare:]

        def row(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            kind = list(mix)[int(rng.choice(len(mix), p=shares / shares.sum()))]
            if kind in data.KINDS:
                return kind, data.row_of_kind(rng, source, tokens, kind)[0]
            if kind == "books":
                return kind, rows.text_row(rng, plain, tokens)[0]
            chosen = {"dialogue": 1.0} if kind == "dialogue" else families
            name, ids, _ = tasks.draw(rng, source, tokens, chosen)
            return (kind if name == kind else f"{kind}/{name}"), ids

        return draw

    return drawing(train, train), drawing(held, books)


def _documents(settings: Settings, written: Text) -> tuple[Draw, Draw]:
    given = settings.recording.data
    folder = Path(given.get("folder", ""))
    if not folder.is_dir() or "folder" not in given:
        raise ConfigError(
            f"traces.data.folder: {given.get('folder')!r} is no folder. Put .jsonl or .txt files of "
            "documents into one and name it."
        )
    least = min(settings.recording.lengths) // 8  # of characters: a text this short has no chance
    long = (one for one in gate_rows.read_documents(folder) if len(one) >= least)
    head = np.asarray(written.encode(given.get("instruction", "")), np.int32)
    ids = [np.concatenate([head, one]) for one in gate_rows.encoded(written.tokenizer, long)]

    def drawing(mine: list[np.ndarray]) -> Draw:
        sizes = np.asarray([len(one) for one in mine])
        for tokens in settings.recording.lengths:
            if not np.any(sizes >= tokens):
                raise ConfigError(
                    f"traces.lengths: {tokens} tokens, but too few documents of {folder} are as long. Give "
                    "longer documents or shorter lengths."
                )

        def draw(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            return "document", mine[int(rng.choice(np.flatnonzero(sizes >= tokens)))][:tokens]

        return draw

    apart = gate_rows.HELD
    return drawing([x for i, x in enumerate(ids) if i % apart]), drawing(ids[::apart])
