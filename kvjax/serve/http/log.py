"""The log: one JSON object a line on standard error, with counts and names, never prompts or answers.

A thread of its own writes the lines. If nobody reads them, a full pipe blocks that thread and no other.
Lines for which the queue has no room are dropped and counted; the next line that fits comes after one that
says how many were lost.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any

QUEUE_SIZE = 4096  # lines that may wait to be written


class Log:
    """Writes events; never blocks. Any thread."""

    def __init__(self, write: Callable[[bytes], Any] | None = None, size: int = QUEUE_SIZE) -> None:
        """Starts the thread that writes.

        Args:
          write: takes a whole line; may block. None: nothing is logged.
          size: lines that may wait.
        """
        self._queue: Queue[bytes] = Queue(size)
        self._handler = logging.NullHandler() if write is None else _LineQueue(self._queue)
        self._logger = logging.Logger("kvjax.serve.http")
        self._logger.addHandler(self._handler)
        if write is not None:
            _LineWriter(self._queue, write).start()

    def __call__(self, event: str, **facts: Any) -> None:
        self._logger.info(event, extra={"facts": facts})

    def fault(self, event: str, error: BaseException, **facts: Any) -> None:
        """Logs an unexpected error and the frames it came through, without the values in them."""
        self._logger.error(event, exc_info=error, extra={"facts": facts})

    def flush(self, seconds: float) -> bool:
        """Waits until all lines so far are written; False if that takes longer than ``seconds``."""
        written = self._queue.all_tasks_done
        with written:
            return written.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    @contextlib.contextmanager
    def library_warnings(self) -> Iterator[None]:
        """Inside, this log takes the warnings of libraries: a full stderr pipe would block them."""
        root = logging.getLogger()
        root.addHandler(self._handler)
        try:
            yield
        finally:
            root.removeHandler(self._handler)


class _LineQueue(QueueHandler):
    """Formats records as JSON lines and queues them; counts those that found no room."""

    _lost = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return hasattr(record, "facts") or record.levelno >= logging.WARNING

    def prepare(self, record: logging.LogRecord) -> bytes:
        event, facts = str(record.msg), getattr(record, "facts", None)
        if facts is None:  # of a library: its arguments may quote a prompt, so only its template is kept
            facts = {"logger": record.name, "level": record.levelname.lower(), "text": event}
            event = "warning"
        if record.exc_info and (error := record.exc_info[1]):
            frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
            facts = {"error": type(error).__name__, "message": str(error), "frames": frames} | facts
        return _line(event, facts)

    def enqueue(self, line: Any) -> None:  # under the handler's lock, so lines stay in the order of the calls
        try:
            if self._lost:
                self.queue.put_nowait(_line("log", {"lost": self._lost}))
                self._lost = 0
            self.queue.put_nowait(line)
        except Full:
            self._lost += 1


class _LineWriter(QueueListener):
    """Writes lines in a thread of its own."""

    def __init__(self, queue: Queue[bytes], write: Callable[[bytes], Any]) -> None:
        super().__init__(queue)
        self._write = write

    def handle(self, line: Any) -> None:
        with contextlib.suppress(OSError):  # a closed pipe, a full disk: the server goes on
            self._write(line)


def _line(event: str, facts: dict[str, Any]) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": event} | facts, ensure_ascii=False, default=str)
    return f"{line}\n".encode(errors="backslashreplace")


def stderr_log() -> Log:
    """A log that writes to standard error."""
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
