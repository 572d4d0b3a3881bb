"""One side of a comparison: a process that is asked for one thing at a time and answers in JSON lines.

``Child`` is the asking end; ``answer`` is what a child of ours does with what it is asked. The peers' script,
which imports nothing of ours, has an ``answer`` of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.bench import machine


class ChildError(RuntimeError):
    """The process ended, or could not do what it was asked; the message is its own last line."""


class Child:
    """A process that stays alive between requests, so that two sides can take turns.

    Use it in a ``with``; leaving ends the process.
    """

    def __init__(self, command: Sequence[str], threads: int) -> None:
        """Start it, pinned to so many CPUs (its last argument names them)."""
        cpus = ",".join(map(str, machine.cpus(threads)))
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, cpus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=machine.environment(threads),
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


def answer(verbs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Pin this process to the CPUs named on its command line and answer until standard input ends."""
    machine.pin([int(cpu) for cpu in sys.argv[1].split(",")])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = verbs[request.pop("do")](**request)
        except Exception as error:  # the other end decides what an error means
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(found), file=answers, flush=True)
