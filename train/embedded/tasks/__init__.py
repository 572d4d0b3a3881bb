"""Training rows for every kind of task that the embedded model is asked: one module a task.

A module's functions take (rng, source, length, further choices) and give a row of exactly ``length`` tokens,
(ids int32 [N], loss weight float32 [N]), or None when this draw does not fit. A choice that is None is drawn.
Each module says in ``FITS`` from how many tokens on its rows fit.

A row's key words come from its source alone, and random names are split by the same checksum as key words, so
rows of a held-out source never show a key of training. Texts, words and puzzles are those of the evaluation
(``kvjax.eval.tasks``) where both worlds have the task; each world draws and fills its samples in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from train.embedded.tasks import (
    arithmetic,
    associations,
    dialogue,
    labels,
    niah,
    pairs,
    rerank,
    stories,
    tracking,
    words,
)
from train.embedded.tasks.pieces import Row, RowFn
from train.rows import Source, text_row

__all__ = ["FITS", "SHARES", "TASKS", "Row", "RowFn", "draw"]

_TABLE: dict[str, tuple[RowFn, int, float]] = {
    "niah": (niah.row, niah.FITS, 0.22),
    "needles": (niah.many, niah.FITS, 0.0),
    "tracking": (tracking.row, tracking.FITS, 0.12),
    "chains": (tracking.many, tracking.MANY_FITS, 0.0),
    "cwe": (words.cwe, words.CWE_FITS, 0.06),
    "fwe": (words.fwe, words.FWE_FITS, 0.06),
    "stories": (stories.row, stories.FITS, 0.16),
    "labels": (labels.row, labels.FITS, 0.10),
    "rerank": (rerank.row, rerank.FITS, 0.05),
    "arithmetic": (arithmetic.row, arithmetic.FITS, 0.08),
    "dialogue": (dialogue.row, dialogue.FITS, 0.06),
    "pairs": (pairs.row, pairs.FITS, 0.05),
    "associations": (associations.row, associations.FITS, 0.04),
}
TASKS: dict[str, RowFn] = {name: row for name, (row, _, _) in _TABLE.items()}
FITS: dict[str, int] = {name: fits for name, (_, fits, _) in _TABLE.items()}
"""Tokens from which on at least 95 rows of 100 draws are not None."""
SHARES: dict[str, float] = {name: share for name, (_, _, share) in _TABLE.items()}
"""The default mixture: how often each task that fits is drawn."""


def draw(
    rng: np.random.Generator, source: Source, length: int, shares: Mapping[str, float] = SHARES
) -> tuple[str, np.ndarray, np.ndarray]:
    """A row of a random task.

    Args:
      rng: consumed.
      source: text and key words.
      length: N, tokens of the row.
      shares: how often each task is drawn, relative to the others; tasks that do not fit are left out.

    Returns:
      (task, ids int32 [N], loss weight float32 [N]); plain text, named "text", where no task fits.

    Raises:
      ValueError: ``shares`` names an unknown task.
    """
    if unknown := set(shares) - set(TASKS):
        raise ValueError(
            f"draw(shares={dict(shares)}) names no task: {', '.join(sorted(unknown))}. "
            f"Tasks are {', '.join(TASKS)}."
        )
    left = {name: share for name, share in shares.items() if share > 0 and FITS[name] <= length}
    while left:
        chances = np.asarray(list(left.values()))
        name = list(left)[int(rng.choice(len(left), p=chances / chances.sum()))]
        for _ in range(4):
            row = TASKS[name](rng, source, length)
            if row is not None:
                return name, *row
        del left[name]
    return "text", *text_row(rng, source, length)
