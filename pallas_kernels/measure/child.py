"""A process of its own that is told things and answers in lines of JSON, and that may die or hang."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

MARK = "@ "
"""Begins a line that is an answer; whatever else is printed is none."""

HOME = pathlib.Path(__file__).parents[2]
"""Where the package lies: the child imports the same one."""


class LostError(RuntimeError):
    """The process ended before its time, or did not answer in time."""


def answer(value: Any) -> None:
    """In the child: say something to the parent."""
    print(MARK + json.dumps(value), flush=True)


class Child:
    """``python -m module args``, whose answers are heard one by one.

    Use it in a ``with``; leaving ends the process. Its standard error is kept for ``LostError``.
    """

    def __init__(
        self, module: str, *args: str, env: Mapping[str, str], errors: pathlib.Path | None = None
    ) -> None:
        path = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._errors = errors.open("w+") if errors else tempfile.TemporaryFile("w+")  # noqa: SIM115, see end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env=os.environ | {"PYTHONPATH": path} | dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                self._said.put(line[len(MARK) :])
        self._said.put(None)

    def tell(self, what: Any) -> None:
        """Send it a line.

        Raises:
          LostError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._lost()

    def hear(self, limit: float | None = None) -> Any:
        """Its next answer.

        Raises:
          LostError: it has ended, with its last words, or says nothing for ``limit`` seconds.
        """
        try:
            line = self._said.get(timeout=None if limit is None else max(0.0, limit))
        except queue.Empty:
            raise LostError("no answer in time") from None
        return self._lost() if line is None else json.loads(line)

    def _lost(self) -> NoReturn:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Unsupported|Exception)\b", line)]
        raise LostError(
            f"the process ended with code {code}: {(errors or lines or ['no message'])[-1][:300]}"
        )

    def end(self) -> None:
        """Stop it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._errors.close()
