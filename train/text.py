"""Text to train on: public-domain books and speeches, a word list, a tokenizer, token arrays.

The books are not in the repository but in the folder ``KVJAX_DATA``, by default ``../shared/data`` beside the
checkout. Without them a small grammar generates a stand-in, so that every program and test runs; it teaches
recall, not English.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.eval.tasks.words import held_out_word as held_out_word

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)

ESSAYS = "essays_by_ralph_waldo_emerson"
ESSAY_BYTES = slice(25_305, 407_233)
"""Emerson's Essays without the introduction and the school notes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Raw text by use.

    Attributes:
      train: books and speeches whose licences let trained weights be passed on.
      held: books never trained on.
      essays: the held-out haystack.
      words: key words, all splits.
    """

    train: tuple[str, ...]
    held: tuple[str, ...]
    essays: str
    words: tuple[str, ...]


def data_folder() -> Path | None:
    """The folder of the data pack, or None."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("KVJAX_DATA", beside))
    return folder if (folder / "books" / "train").is_dir() else None


def corpus(folder: Path | None, *, seed: int = 0) -> Corpus:
    """Reads the data pack; without a ``folder`` generates the stand-in, with a note on standard error."""
    if folder is None:
        print(
            "no books: KVJAX_DATA names no data pack, so text is written by a small grammar", file=sys.stderr
        )
        return _generated(np.random.default_rng(seed))
    read = lambda path: gzip.decompress(path.read_bytes())  # noqa: E731
    train = sorted((folder / "books" / "train").glob("*.gz")) + sorted((folder / "speeches").glob("*.gz"))
    held = sorted((folder / "books" / "heldout").glob("*.gz"))
    essays = next(path for path in held if path.name.startswith(ESSAYS))
    words = read(folder / "wordlists" / "common_words.txt.gz").decode().split()
    return Corpus(
        train=tuple(read(path).decode() for path in train),
        held=tuple(read(path).decode() for path in held if path != essays),
        essays=re.sub(r"\[\d+\]", "", read(essays)[ESSAY_BYTES].decode(errors="ignore")),
        words=tuple(word for word in words if word.isalpha() and 4 <= len(word) <= 9),
    )


def _generated(rng: np.random.Generator) -> Corpus:
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "on")]
    make = lambda count: "".join(rng.choice(syllables, count))  # noqa: E731
    words = sorted({make(n) for n in rng.integers(2, 4, 600)})

    def book(sentences: int) -> str:
        nouns = rng.choice(words, (sentences, 3))
        verbs = rng.choice(["finds", "sees", "carries", "asks"], sentences)
        return " ".join(f"The {a} {v} the {b} by the {c}." for (a, b, c), v in zip(nouns, verbs))

    return Corpus(train=(book(4000), book(4000)), held=(book(800),), essays=book(1500), words=tuple(words))


def unwrap(text: str) -> str:
    """Replaces line breaks inside paragraphs by blanks; one empty line separates paragraphs."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def train_tokenizer(texts: Iterable[str], vocab_size: int, digits: int = 1) -> Tokenizer:
    """Byte-level BPE, tokens of at most ``digits`` digits, specials ``<pad> <bos> <eos>`` first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    figures = (
        pre_tokenizers.Digits(individual_digits=True)
        if digits == 1
        else pre_tokenizers.Split(Regex(rf"\d{{1,{digits}}}"), "isolated")
    )
    split = [figures, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (text[i : i + 2000] for text in texts for i in range(0, len(text), 2000))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def load_tokenizer(path: Path, texts: Iterable[str], vocab_size: int, digits: int = 1) -> Tokenizer:
    """Reads ``path``; where it does not exist, trains on ``texts`` and writes it."""
    from tokenizers import Tokenizer

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(texts, vocab_size, digits).save(str(path))
    return Tokenizer.from_file(str(path))


def token_array(tokenizer: Tokenizer, texts: tuple[str, ...], cache: Path | None = None) -> np.ndarray:
    """All texts as one int32 array of ids, kept in ``cache`` under a hash of both inputs."""
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        digest.update(text.encode())
    path = None if cache is None else cache / f"tokens_{digest.hexdigest()[:16]}.npy"
    if path is not None and path.exists():
        return np.load(path)
    # Paragraph by paragraph: one encode call over a whole book is slow and needs much memory.
    pieces = [piece for text in texts for piece in re.split(r"(?<=\n\n)", text)]
    ids = [np.asarray(e.ids, np.int32) for e in tokenizer.encode_batch(pieces)]
    array = np.concatenate(ids)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
    return array
