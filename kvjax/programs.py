"""Limits on compiled programs: in a process memory maps, which Linux limits, in the cache folder bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

EVERY = 32
"""Programs that are written to a folder between two looks at its size."""


def maps_taken(of: Path = Path("/proc")) -> float:
    """Memory maps of this process over the most it may have; 0.0 where the system does not tell."""
    try:
        most = int((of / "sys/vm/max_map_count").read_text())
        with (of / "self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    except (OSError, ValueError):
        return 0.0


class Folder:
    """A folder of compiled programs that stays below so many bytes: the least recently used files go.

    JAX can bound it itself (``jax_compilation_cache_max_size``). But it needs another package for that, looks
    at every file at each write, and fails where files were written without the bound.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most, self._written = path, most, 0

    def on_event(self, event: str, **facts: object) -> None:
        """What ``jax.monitoring`` calls: looks at the folder now and then."""
        if event == "/jax/compilation_cache/cache_misses":  # a program was written
            self._written += 1
            if self._written % EVERY == 0:
                self.bound()

    def bound(self) -> int:
        """Above the limit deletes files until three quarters of it are left; the bytes that there are.

        A file was used when it was last read, as far as the file system notes that (most do once a day), else
        when it was written.
        """
        files = sorted(self._files(), key=lambda file: file[0])
        size = sum(size for _, size, _ in files)
        if size <= self._most:
            return size
        for _, bytes_of_file, file in files:
            if size <= 0.75 * self._most:
                break
            with contextlib.suppress(OSError):  # another process may be at it, too
                file.unlink()
            size -= bytes_of_file
        return size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for folder, _, names in os.walk(self._path):
            for name in names:
                file = Path(folder) / name
                try:
                    facts = file.stat()
                except FileNotFoundError:
                    continue
                yield max(facts.st_atime, facts.st_mtime), facts.st_size, file
