"""The log: a JSON object a line on standard error, of counts and names, never of prompts or answers."""

from __future__ import annotations

import datetime
import json
import sys
import threading
import traceback
from typing import Any, TextIO


class Log:
    """Writes events.

    Attributes:
      stream: where to; None writes nothing.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self._lock = threading.Lock()

    def __call__(self, event: str, **facts: Any) -> None:
        """One event with its facts."""
        if self.stream is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event} | facts, ensure_ascii=False, default=str)
        with self._lock:
            print(line, file=self.stream, flush=True)

    def fault(self, event: str, error: BaseException, **facts: Any) -> None:
        """An error that nobody expected, and where it came from: frames, not the values in them."""
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        self(event, error=type(error).__name__, message=str(error), frames=frames, **facts)


def to_stderr() -> Log:
    """The process's log."""
    return Log(sys.stderr)
