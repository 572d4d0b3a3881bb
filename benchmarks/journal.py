"""What an unfinished run has measured so far, so that an interrupted one goes on where it stopped.

One JSON line a group of rows that were measured in turns, beside the results; the first line says of which
command, code and machine. Another command, commit or machine begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Journal:
    """Groups of rows, kept on disk while a run lasts.

    Attributes:
      groups: what was measured before this process began.
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
        """Keep a group; ``seconds`` since this process began."""
        if self._file is None:
            return
        fresh = not self._file.exists()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            if fresh:
                print(json.dumps(self._about), file=file)
            print(json.dumps({"seconds": self.seconds + seconds, "rows": list(rows)}), file=file)

    def finish(self) -> None:
        """The run is saved as a result: forget it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
