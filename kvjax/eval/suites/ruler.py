"""RULER's string matches (https://arxiv.org/abs/2404.06654), as two programs count them.

kvpress counts as RULER does: of questions (qa) any reference, of everything else the share of references;
it deletes control characters. lm-eval turns them into line breaks, and of a qa question it counts the share
of references, too: there the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def _found(output: str, refs: Sequence[str]) -> list[bool]:
    return [ref.lower() in output.lower() for ref in refs]


def kvpress(task: str, output: str, refs: Sequence[str]) -> float:
    """The score in [0, 1] of one output, as kvpress's ``ruler`` counts it."""
    found = _found(_CONTROL.sub("", output.strip()).strip(), refs)
    return float(any(found)) if task.split("_")[0] == "qa" else sum(found) / len(found)


def lm_eval(output: str, refs: Sequence[str]) -> float:
    """The score in [0, 1] of one output, as lm-eval counts it for every task, qa included."""
    found = _found(_CONTROL.sub("\n", output.strip()).strip(), refs)
    return sum(found) / len(found)
