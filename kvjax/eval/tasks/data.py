"""Texts and words to evaluate on: held-out parts of the data pack, or a generated twin of them.

The pack is not in the repository: it lies in ``KVJAX_DATA``, or in ``../shared/data`` beside the checkout.
Where it is absent a small grammar writes books and words, and every result row says so. Key words are the
fifth of the list that training never sees (``words``).
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval.errors import EvalError
from kvjax.eval.tasks.words import held_out_word

ESSAYS = slice(25_305, 407_233)
"""Bytes of Emerson's Essays without introduction and notes."""
DRACULA = slice(0, 843_566)
"""Bytes of Dracula without the transcriber's list."""

PACK = "the data pack (set KVJAX_DATA to its folder)"


def unwrap(text: str) -> str:
    """All white space to single blanks."""
    return " ".join(text.split())


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a running text, 20 to 400 characters long."""
    parts = re.split(r"(?<=[a-z][.!?])\s+(?=[A-Z\"'])", unwrap(text))
    return tuple(s for s in parts if 20 <= len(s) <= 400 and s[-1] in ".!?")


@dataclasses.dataclass(frozen=True)
class Data:
    """The data pack in ``folder``, or its generated twin where that is None."""

    folder: Path | None

    @property
    def source(self) -> str:
        """As in result rows: "pack" or "generated"."""
        return "generated" if self.folder is None else "pack"

    def has(self, name: str) -> bool:
        return self.folder is not None and (self.folder / name).is_file()

    def raw(self, name: str) -> bytes:
        """A file of the pack, unpacked.

        Raises:
          EvalError: no such file.
        """
        if self.folder is None or not self.has(name):
            raise EvalError(f"{name} is not there and has no generated twin. It comes with {PACK}.")
        return _unpacked(self.folder / name)

    def lines(self, name: str) -> list[Any]:
        """The objects of a JSON-lines file."""
        return [json.loads(line) for line in self.raw(name).decode().splitlines() if line.strip()]

    def essays(self) -> tuple[str, ...]:
        """Sentences of the needle haystack."""
        return _essays(self)

    def novel(self) -> tuple[str, ...]:
        """Sentences of the background of hidden facts."""
        return _novel(self)

    def words(self) -> tuple[str, ...]:
        """Key words of evaluation."""
        return _words(self)


@functools.lru_cache(maxsize=16)
def _unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def find() -> Data:
    """The data pack, if there is one."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    folder = Path(os.environ.get("KVJAX_DATA", beside))
    return Data(folder if (folder / "books" / "heldout").is_dir() else None)


@functools.cache
def _essays(data: Data) -> tuple[str, ...]:
    if data.folder is None:
        return _grammar(data, 1)
    raw = data.raw("books/heldout/essays_by_ralph_waldo_emerson_16643.txt.gz")[ESSAYS]
    return sentences(re.sub(r"\[\d+\]", "", raw.decode(errors="ignore")))


@functools.cache
def _novel(data: Data) -> tuple[str, ...]:
    if data.folder is None:
        return _grammar(data, 2)
    return sentences(data.raw("books/heldout/dracula_345.txt.gz")[DRACULA].decode(errors="ignore"))


@functools.cache
def _words(data: Data) -> tuple[str, ...]:
    if data.folder is None:
        words = _syllables(np.random.default_rng(3), 4000)
    else:
        words = data.raw("wordlists/common_words.txt.gz").decode().split()
    fitting = {word for word in words if word.isalpha() and 4 <= len(word) <= 9}
    return tuple(sorted(word for word in fitting if held_out_word(word)))


def _syllables(rng: np.random.Generator, count: int) -> list[str]:
    parts = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "on")]
    return [
        "".join(parts[i] for i in rng.integers(0, len(parts), size)) for size in rng.integers(2, 4, count)
    ]


def _grammar(data: Data, seed: int) -> tuple[str, ...]:
    """Sentences that stand in for a book."""
    rng = np.random.default_rng(seed)
    words = _syllables(rng, 400)
    verbs = ("finds", "sees", "carries", "asks", "follows", "paints")
    nouns = rng.integers(0, len(words), (3000, 3))
    actions = rng.integers(0, len(verbs), 3000)
    return tuple(
        f"The {words[a]} {verbs[v]} the {words[b]} by the {words[c]}." for (a, b, c), v in zip(nouns, actions)
    )
