"""A child process that gets requests and answers in lines of JSON, and that may die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

MARK = "@ "
"""Begins a line that is an answer; other lines are ignored."""

HOME = pathlib.Path(__file__).parents[2]
"""The folder of the package: the child imports the same one."""


class LostError(RuntimeError):
    """The process ended before its time, or did not answer in time."""


def answer(value: Any) -> None:
    """In the child: send something to the parent."""
    print(MARK + json.dumps(value), flush=True)


class Child:
    """A command whose answers are read one by one; ``running`` starts a Python module.

    Use it in a ``with``; leaving ends the process. Its standard error is kept for ``LostError``.

    Args:
      command: the command line.
      env: its whole environment.
      errors: a file to keep its standard error in.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], errors: pathlib.Path | None = None
    ) -> None:
        self._errors = (
            errors.open("w+", errors="replace") if errors else tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, see end()
        )
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def running(
        cls, module: str, *args: str, env: Mapping[str, str], errors: pathlib.Path | None = None
    ) -> Child:
        """``python -m module args`` with this process' environment and ``env``."""
        path = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path} | dict(env)
        return cls([sys.executable, "-m", module, *args], env=environment, errors=errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                self._answers.put(line[len(MARK) :])
        self._answers.put(None)

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
          LostError: it has ended (with its last lines), or sends nothing for ``limit`` seconds.
        """
        try:
            line = self._answers.get(timeout=None if limit is None else max(0.0, limit))
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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # it went before it read its last request
                    pipe.close()
        self._errors.close()
