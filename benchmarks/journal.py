"""The rows of an unfinished run, so that an interrupted one goes on where it stopped.

A file beside the results: the first line is the command, code and machine, each further one a group of rows
that were measured in turns. Another command, commit or machine starts from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Row


class Journal:
    """Groups of rows, kept on disk while a run lasts.

    Attributes:
      groups: measured before this process began.
      seconds: how long that took.
    """

    def __init__(self, file: Path | None, about: Row) -> None:
        self._file, self._about = file, about
        self.groups: list[list[Row]] = []
        self.seconds = 0.0
        if file is not None and file.exists():
            self._read(file)

    def _read(self, file: Path) -> None:
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break  # the process ended while it wrote this one
        if lines and lines[0] == self._about:
            self.groups = [line["rows"] for line in lines[1:]]
            self.seconds = lines[-1]["seconds"] if self.groups else 0.0
        if not self.groups:
            file.unlink()

    def add(self, rows: Sequence[Row], seconds: float) -> None:
        """Keeps a group; ``seconds`` since this process began."""
        if self._file is None:
            return
        fresh = not self._file.exists()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            if fresh:
                print(json.dumps(self._about), file=file)
            print(json.dumps({"seconds": self.seconds + seconds, "rows": list(rows)}), file=file)

    def finish(self) -> None:
        """Removes the file: the run is saved as a result."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
