"""API keys: where they come from, and how one is compared."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvjax.cli import InputError

VARIABLE = "KVJAX_API_KEY"
"""Of the environment; several keys are separated by commas."""


class Keys:
    """The keys that are let in. With none, everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, authorization: str) -> bool:
        """Is the header ``Bearer KEY`` with one of the keys? Wrong ones take as long as right ones."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them, always
        return scheme.lower() == "bearer" and any(found)


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """The keys of a file (one a line, ``#`` begins a comment) and of the environment.

    Raises:
      InputError: a file that cannot be read, or that holds no key.
    """
    keys = [key.strip() for key in environment.get(VARIABLE, "").split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {file} cannot be read ({error}). Give a text file.") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise InputError(f"--api-key-file {file} holds no key. Write one a line.")
        keys += found
    return Keys(key for key in keys if key)
