"""One side of a comparison: a process that does one request at a time.

``Child`` sends requests; ``answer`` runs in a child of ours and answers them. The peers' script imports
nothing of ours and has its own loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import machine
from pallas_kernels.measure import child


class ChildError(RuntimeError):
    """The process ended, or could not do a request; the message is its own last line."""


class Child(child.Child):
    """A process that stays alive between requests, so that two sides can take turns."""

    def __init__(self, command: Sequence[str], threads: int, devices: int = 1) -> None:
        """Starts it, pinned to so many CPUs (its last argument names them), with so many virtual devices."""
        cpus = ",".join(map(str, machine.cpus(threads)))
        super().__init__([*command, cpus], env=machine.environment(threads, devices))

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        """Sends one request and waits for its answer.

        Raises:
          ChildError: the process answered with an error, or is gone.
        """
        try:
            self.tell({"do": do} | values)
            answer = self.hear()
        except child.LostError as error:
            raise ChildError(str(error)) from None
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer


def answer(verbs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Pins this process to the CPUs named on its command line and answers until standard input ends."""
    machine.pin([int(cpu) for cpu in sys.argv[1].split(",")])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = verbs[request.pop("do")](**request)
        except Exception as error:  # the other end decides what an error means
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        child.answer(reply)
