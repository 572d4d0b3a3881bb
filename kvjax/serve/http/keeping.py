"""Held contexts on disk, where they are asked for: written when they are read, so that a crash loses none."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from kvjax.cli import InputError
from kvjax.engine import Contexts
from kvjax.saving import StateError
from kvjax.weights import Source


class Keeper:
    """Mirrors the held contexts into a folder; without a folder it does nothing. Any thread."""

    def __init__(self, contexts: Contexts, folder: Path | None) -> None:
        self._contexts, self._folder = contexts, folder
        self._lock = threading.Lock()

    def load(self, weights: Mapping[str, Source]) -> int:
        """Takes up what an earlier server left; how many.

        Args:
          weights: learned ones that this server was given, for contexts whose own are gone.

        Raises:
          InputError: files that are damaged or of another model.
        """
        if self._folder is None or not self._folder.is_dir():
            return 0
        try:
            return len(self._contexts.load(self._folder, weights=weights))
        except (OSError, StateError) as error:
            raise InputError(f"--save-contexts {self._folder}: {error}") from error

    def save(self) -> None:
        """Writes all of them.

        Raises:
          OSError: the folder cannot be written.
        """
        if self._folder is not None:
            with self._lock:
                self._contexts.save(self._folder)

    def delete(self, name: str) -> None:
        """Forgets one, and its file.

        Raises:
          ContextNotFound: none of that name.
          OSError: the folder cannot be written.
        """
        if self._folder is None:
            return self._contexts.delete(name)
        with self._lock:
            before: set[Path] = set(self._contexts.save(self._folder))
            self._contexts.delete(name)
            for file in before - set(self._contexts.save(self._folder)):
                file.unlink(missing_ok=True)
        return None
