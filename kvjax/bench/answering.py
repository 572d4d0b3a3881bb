"""The child's end of ``child.py``: read a request, do it, print the answer as one JSON line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.bench import machine


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
