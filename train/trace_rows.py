"""The sequences of which traces are made: RULER's tasks, dialogue, books and training rows; chats; documents.

They are encoded by the model's own tokenizer. Sequence i depends on (seed, split, i) alone, so a run that was
stopped continues with the same ones. Text, words and documents of evaluation are never read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train import chat_rows, gate_rows, rows, text
from train.config import ConfigError, number, require
from train.ranker.settings import Settings

if TYPE_CHECKING:
    from kvjax.text import Text

KINDS = ("ruler", "dialogue", "books")
"""Drawn evenly without a ``traces.data.mix``, which may also name kinds of ``train.embedded.data.KINDS``."""

RULER = {"niah": 1.0, "tracking": 1.0, "cwe": 1.0, "fwe": 1.0}
"""Tasks of a "ruler" row, and how often each is drawn."""

Draw = Callable[[np.random.Generator, int], tuple[str, np.ndarray]]
"""(random generator, tokens) to (task, ids)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """All sequences of a config, drawn when asked for.

    Attributes:
      settings: lengths and numbers of sequences.
      train, held: draw a sequence of the training or the held-out split.
    """

    settings: Settings
    train: Draw
    held: Draw

    def length(self, index: int) -> int:
        """Tokens of a sequence."""
        return length(self.settings, index)

    def draw(self, index: int) -> tuple[str, np.ndarray]:
        """(task, ids) of a sequence."""
        tokens, rng = _length_and_generator(self.settings, index)
        split = self.train if index < self.settings.recording.sequences else self.held
        return split(rng, tokens)


def length(settings: Settings, index: int) -> int:
    """Tokens of a sequence, without drawing it."""
    return _length_and_generator(settings, index)[0]


def _length_and_generator(settings: Settings, index: int) -> tuple[int, np.random.Generator]:
    recording = settings.recording
    rng = np.random.default_rng((settings.seed, index >= recording.sequences, index))
    shares = np.asarray(recording.shares, float)
    return int(rng.choice(recording.lengths, p=shares / shares.sum())), rng


def sequences(settings: Settings, model_text: Text) -> Sequences:
    """The sequences of a config, encoded by a model's tokenizer.

    Raises:
      ConfigError: unknown kinds or tasks, no documents, or none long enough.
    """
    read = {"rows": _rows, "documents": _documents, "chat": _chats}
    train, held = read[settings.recording.data.get("kind", "rows")](settings, model_text)
    return Sequences(settings=settings, train=train, held=held)


def _rows(settings: Settings, model_text: Text) -> tuple[Draw, Draw]:
    from train.embedded import tasks  # traces of documents go without them
    from train.embedded.data import KINDS as TRAINED_KINDS
    from train.embedded.data import row_of_kind

    config = settings.recording.data
    mix = config.get("mix", dict.fromkeys(KINDS, 1.0))
    known = (*KINDS, *TRAINED_KINDS)
    require(
        bool(mix) and set(mix) <= set(known), "traces.data.mix", mix, f"names others than {', '.join(known)}."
    )
    shares = np.asarray([number(share, "traces.data.mix") for share in mix.values()])
    families = config.get("families", RULER)
    require(
        set(families) <= set(tasks.TASKS),
        "traces.data.families",
        families,
        f"names no task. Tasks are {', '.join(tasks.TASKS)}.",
    )
    corpus = text.corpus(text.data_folder(), seed=settings.seed)
    tokenizer = chat_rows.without_special_tokens(model_text.tokenizer)
    train, held, books = rows.sources(corpus, tokenizer, settings.folder.parent / "cache")
    # Rows begin with the embedded model's BOS: it is replaced by the model's own, or dropped.
    dropped = int(model_text.bos is None)

    def drawing(source: rows.Source, plain: rows.Source) -> Draw:
        def draw(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            name, ids = row(rng, tokens + dropped)
            if model_text.bos is not None:
                ids[0] = model_text.bos
            return name, ids[dropped:]

        def row(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            kind = list(mix)[int(rng.choice(len(mix), p=shares / shares.sum()))]
            if kind in TRAINED_KINDS:
                return kind, row_of_kind(rng, source, tokens, kind)[0]
            if kind == "books":
                return kind, rows.text_row(rng, plain, tokens)[0]
            chosen = {"dialogue": 1.0} if kind == "dialogue" else families
            name, ids, _ = tasks.draw(rng, source, tokens, chosen)
            return (kind if name == kind else f"{kind}/{name}"), ids

        return draw

    return drawing(train, train), drawing(held, books)


def _chats(settings: Settings, model_text: Text) -> tuple[Draw, Draw]:
    both = chat_rows.material(model_text, settings.folder.parent / "cache", seed=settings.seed)
    mix = settings.recording.data.get("mix", dict.fromkeys(chat_rows.KINDS, 1.0))
    shares = chat_rows.shares(mix, both[0], "traces.data.mix")

    def drawing(material: chat_rows.Material) -> Draw:
        own = {kind: share for kind, share in shares.items() if material.has(kind)}
        return lambda rng, tokens: chat_rows.draw(rng, material, tokens, own)[:2]

    return drawing(both[0]), drawing(both[1])


def _documents(settings: Settings, model_text: Text) -> tuple[Draw, Draw]:
    config = settings.recording.data
    folder = Path(config.get("folder", ""))
    if not folder.is_dir() or "folder" not in config:
        raise ConfigError(
            f"traces.data.folder: {config.get('folder')!r} is not a folder. Put .jsonl or .txt files of "
            "documents into one and name it."
        )
    least = min(settings.recording.lengths) // 8  # characters: a shorter text cannot have that many tokens
    long = (one for one in gate_rows.document_texts(folder) if len(one) >= least)
    head = np.asarray(model_text.encode(config.get("instruction", "")), np.int32)
    ids = [np.concatenate([head, one]) for one in gate_rows.encoded(model_text.tokenizer, long)]

    def drawing(documents: list[np.ndarray]) -> Draw:
        sizes = np.asarray([len(one) for one in documents])
        for tokens in settings.recording.lengths:
            if not np.any(sizes >= tokens):
                raise ConfigError(
                    f"traces.lengths: {tokens} tokens, but too few documents of {folder} are as long. Give "
                    "longer documents or shorter lengths."
                )

        def draw(rng: np.random.Generator, tokens: int) -> tuple[str, np.ndarray]:
            return "document", documents[int(rng.choice(np.flatnonzero(sizes >= tokens)))][:tokens]

        return draw

    held = gate_rows.HELD
    return drawing([x for i, x in enumerate(ids) if i % held]), drawing(ids[::held])
