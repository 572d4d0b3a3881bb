"""Batches for gates: rows of the embedded model's mixture, chats, or documents behind an instruction.

Batch i depends on the seed and i alone, so a resumed run reads what it would have read.
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

from kvjax.models.gguf_file import read_header
from kvjax.models.gguf_text import read_text
from train import chat_rows, rows, text
from train.gate_settings import ConfigError, Settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvjax.text import Text

HELD = 20
"""Every 20th document is held out for checks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateData:
    """The data of a run.

    Attributes:
      train: batches, dicts whose ``tokens`` are int32 [B, T].
      check: by length, tokens int32 [n, T] of held-out rows.
      held: text and key words for needles; None where the data are chats or documents.
    """

    train: grain.MapDataset
    check: dict[int, np.ndarray]
    held: rows.Source | None


TEXT = "text"
"""The file in a run's folder that says which text its rows are made of."""


def record_text(settings: Settings) -> str:
    """Writes which text a run reads: "books", "stand-in" (``train.text``) or "documents".

    Raises:
      ConfigError: the run began with another text, so it cannot continue as it would have.
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


def recorded_text(settings: Settings) -> str:
    """The text that ``record_text`` wrote, or "unknown"."""
    file = settings.folder / TEXT
    return file.read_text().strip() if file.is_file() else "unknown"


def read_data(settings: Settings, folder: Path | None, text: Text | None = None) -> GateData:
    """The data of a config, encoded by a model's tokenizer.

    Args:
      settings: the config.
      folder: of the model, or its GGUF file; None for a module in memory.
      text: the model's tokenizer with the chat template, for chats and where there is no folder.

    Raises:
      ConfigError: no documents, or none long enough.
    """
    if settings.data["kind"] == "chat":
        assert text is not None
        return _read_chats(settings, text)
    from tokenizers import Tokenizer

    if folder is None:
        assert text is not None
        tokenizer = text.tokenizer
    elif folder.is_file():  # a GGUF file
        tokenizer = read_text(read_header(folder)).tokenizer
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    read = _read_documents if settings.data["kind"] == "documents" else _read_mixture
    return read(settings, tokenizer)


def _read_mixture(settings: Settings, tokenizer: Tokenizer) -> GateData:
    from train.embedded import data as mixture  # trainers of other models go without it

    config, check = settings.data, settings.check
    corpus = text.corpus(text.data_folder(), seed=settings.seed)
    train, held, _ = rows.sources(corpus, tokenizer, settings.folder.parents[1] / "cache")
    keys = ("kinds", "keys", "needles", "tasks", "copies", "magic", "bridge", "clash", "families")
    chosen = {name: config[name] for name in keys if name in config}
    options: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in chosen.items()}
    try:
        level = mixture.Level(
            lengths=tuple(config["lengths"]),
            shares=tuple(config["shares"]),
            scored=config.get("scored", 64),
            **options,
        )
    except ValueError as reason:
        raise ConfigError(f"data.kinds: {reason}") from reason
    mix = mixture.Mix(seed=settings.seed, tokens=config["tokens"], levels=(level,))

    def held_rows(length: int) -> np.ndarray:
        rng = np.random.default_rng((settings.seed, 1, length))
        return np.stack([mixture.training_row(rng, held, length, level)[0] for _ in range(check["rows"])])

    return GateData(
        train=mixture.batches(train, mix, 0, settings.plan.steps),
        check={length: held_rows(length) for length in check["lengths"]},
        held=held,
    )


def _read_chats(settings: Settings, model_text: Text) -> GateData:
    check, cache = settings.check, settings.folder.parents[1] / "cache"
    train, held = chat_rows.material(model_text, cache, seed=settings.seed)
    mix = chat_rows.shares(settings.data["mix"], train, "data.mix")
    own = {kind: share for kind, share in mix.items() if held.has(kind)}

    def held_rows(length: int) -> np.ndarray:
        rng = np.random.default_rng((settings.seed, 1, length))
        return np.stack([chat_rows.draw(rng, held, length, own)[1] for _ in range(check["rows"])])

    return GateData(
        train=grain.MapDataset.source(Chats(train, mix, settings)),
        check={length: held_rows(length) for length in check["lengths"]},
        held=None,
    )


class Chats:
    """Random-access batches of ``chat_rows`` (a grain source).

    Beside the tokens, for S = ``data.scored``: ``at`` int32 [S], the row-major positions that predict the
    tokens of answers, and ``answer`` bool [S], which of them are real.
    """

    def __init__(self, material: chat_rows.Material, mix: dict[str, float], settings: Settings):
        self.material, self.mix, self.settings = material, mix, settings

    def __len__(self) -> int:
        return self.settings.plan.steps

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        data = self.settings.data
        rng = np.random.default_rng((self.settings.seed, int(index)))
        shares = np.asarray(data["shares"], float)
        length = int(rng.choice(data["lengths"], p=shares / shares.sum()))
        count = max(1, data["tokens"] // length)
        _, ids, weights = zip(*(chat_rows.draw(rng, self.material, length, self.mix) for _ in range(count)))
        most = data.get("scored", 64)
        at = np.flatnonzero(np.stack(weights) >= rows.ANSWER)[:most] - 1
        return {
            "tokens": np.stack(ids),
            "at": np.pad(at, (0, most - len(at))).astype(np.int32),
            "answer": np.arange(most) < len(at),
        }


def document_texts(folder: Path) -> Iterator[str]:
    """Texts of a folder in the order of file names: .jsonl(.gz) with a ``text`` a line, .txt(.gz) whole."""
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
    """Ids of each text, few at a time: the tokenizer's results are a hundred times larger than the ids."""
    while part := list(itertools.islice(texts, at_once)):
        for encoding in tokenizer.encode_batch(part, add_special_tokens=False):
            yield np.asarray(encoding.ids, np.int32)


class Documents:
    """Random-access batches of documents cut to one length, each behind the instruction (a grain source)."""

    def __init__(self, texts: list[np.ndarray], head: np.ndarray, settings: Settings, count: int):
        self.texts, self.head, self.settings, self.count = texts, head, settings, count
        self.sizes = np.asarray([len(ids) for ids in texts])
        for length in {*settings.data["lengths"], *settings.check["lengths"]}:
            if not np.any(self.sizes + len(head) >= length):
                raise ConfigError(
                    f"data.lengths: {length} tokens, but no document of {settings.data['folder']} is as "
                    "long. Give longer documents or shorter lengths."
                )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        data = self.settings.data
        rng = np.random.default_rng((self.settings.seed, int(index)))
        shares = np.asarray(data["shares"], float)
        length = int(rng.choice(data["lengths"], p=shares / shares.sum()))
        return {"tokens": self.draw(rng, length, max(1, data["tokens"] // length))}

    def draw(self, rng: np.random.Generator, length: int, count: int) -> np.ndarray:
        """``count`` rows of ``length`` tokens, each a random document of at least that many."""
        long = np.flatnonzero(self.sizes + len(self.head) >= length)
        rows = [np.concatenate([self.head, self.texts[i]])[:length] for i in rng.choice(long, count)]
        return np.stack(rows).astype(np.int32)


def _read_documents(settings: Settings, tokenizer: Tokenizer) -> GateData:
    data, check = settings.data, settings.check
    folder = Path(data["folder"])
    if not folder.is_dir():
        raise ConfigError(
            f"data.folder: {folder} is not there. Put .jsonl or .txt files of documents into it."
        )
    least = min(data["lengths"]) // 8  # characters: a shorter text cannot have that many tokens
    ids = list(encoded(tokenizer, (text for text in document_texts(folder) if len(text) >= least)))
    # The instruction keeps the tokenizer's own beginning of text.
    head = np.asarray(tokenizer.encode(data["instruction"]).ids, np.int32)
    train = Documents([x for i, x in enumerate(ids) if i % HELD], head, settings, settings.plan.steps)
    held = Documents(ids[::HELD], head, settings, 1)
    rng = np.random.default_rng((settings.seed, 1))
    rows_of = {length: held.draw(rng, length, check["rows"]) for length in check["lengths"]}
    return GateData(train=grain.MapDataset.source(train), check=rows_of, held=None)
