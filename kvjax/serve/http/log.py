"""The log: a JSON object a line on standard error, of counts and names, never of prompts or answers.

Lines are written by a thread of their own. Whoever reads them may stop reading: a full pipe then blocks that
thread and nobody else. Lines that find no room are left out and counted, and the next one that does is
preceded by their number.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MOST = 4096
"""Lines that wait to be written."""


class Log:
    """Writes events; never blocks. Any thread."""

    def __init__(self, write: Callable[[bytes], Any] | None = None, most: int = MOST) -> None:
        """Starts the thread that writes.

        Args:
          write: puts a whole line where it belongs; may block. None writes nothing.
          most: lines that wait.
        """
        self._write = write
        self._waiting: queue.Queue[bytes | threading.Event] = queue.Queue(most)
        self._lock = threading.Lock()
        self._lost = 0
        if write is not None:
            threading.Thread(target=self._work, name="kvjax-log", daemon=True).start()

    def __call__(self, event: str, **facts: Any) -> None:
        """One event with its facts."""
        if self._write is None:
            return
        with self._lock:  # order is that of the calls
            told = not self._lost or self._put(_line("log", {"lost": self._lost}))
            self._lost = 0 if told else self._lost
            if not told or not self._put(_line(event, facts)):
                self._lost += 1

    def fault(self, event: str, error: BaseException, **facts: Any) -> None:
        """An error that nobody expected, and where it came from: frames, not the values in them."""
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        self(event, error=type(error).__name__, message=str(error), frames=frames, **facts)

    def flush(self, seconds: float) -> bool:
        """Waits until all lines so far are written, at most so long; False where they are not."""
        written = threading.Event()
        return self._write is None or (self._put(written) and written.wait(seconds))

    def _put(self, item: bytes | threading.Event) -> bool:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _work(self) -> None:
        assert self._write is not None  # noqa: S101
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with contextlib.suppress(OSError):  # a closed pipe, a full disk: the server goes on
                self._write(item)


def _line(event: str, facts: dict[str, Any]) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return f"{json.dumps({'time': now, 'event': event} | facts, ensure_ascii=False, default=str)}\n".encode(
        errors="backslashreplace"
    )


def to_stderr() -> Log:
    """The process's log."""
    try:
        file = sys.stderr.fileno()
    except OSError:  # no file: a notebook, a test
        return Log(lambda line: sys.stderr.write(line.decode()))
    # Past Python's own buffer: a thread that is blocked in it would hold its lock when the process ends.
    raw = io.FileIO(file, "wb", closefd=False)

    def write(line: bytes) -> None:
        while line:
            line = line[raw.write(line) or 0 :]

    return Log(write)


class Others(logging.Handler):
    """Takes warnings of libraries into the log, without the values in them, which may quote a prompt."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One record: who said it, and its words before values were put in."""
        facts: dict[str, Any] = {"logger": record.name, "level": record.levelname.lower()}
        text, error = str(record.msg), record.exc_info and record.exc_info[1]
        if error:
            self._log.fault("warning", error, **facts, text=text)
        else:
            self._log("warning", **facts, text=text)


@contextlib.contextmanager
def others(log: Log) -> Any:
    """Inside, nobody writes to standard error by himself, where a full pipe would block him."""
    handler, root = Others(log), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
