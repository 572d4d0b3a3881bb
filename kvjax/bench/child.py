"""One side of a comparison: a process that is asked for one thing at a time and answers in JSON lines."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any


class ChildError(RuntimeError):
    """The process ended, or could not do what it was asked; the message is its own last line."""


class Child:
    """A process that stays alive between requests, so that two sides can take turns.

    Use it in a ``with``; leaving ends the process.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
          ChildError: the process answered with an error, or is gone.
        """
        assert self._process.stdin is not None  # noqa: S101  (both are pipes)
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps({"do": do} | what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # the process went before it read its last request
        self._said.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return f"the process ended with {code}: {lines[-1] if lines else 'it said nothing'}"
