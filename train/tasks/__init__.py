"""Training rows for every kind of task that the embedded model is asked: one module a task.

Each module says in ``FITS`` from how many tokens on its rows fit. A row's key words come from its
source alone, and random names are split by the same checksum as key words are, so rows of a held-out
source never show a key that training has shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from train.rows import Source, text_row
from train.tasks import (
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
from train.tasks.pieces import Row, RowFn

__all__ = ["FITS", "SHARES", "TASKS", "Row", "RowFn", "draw"]

TASKS: dict[str, RowFn] = {
    "niah": niah.row,
    "needles": niah.many,
    "tracking": tracking.row,
    "chains": tracking.many,
    "cwe": words.cwe,
    "fwe": words.fwe,
    "stories": stories.row,
    "labels": labels.row,
    "rerank": rerank.row,
    "arithmetic": arithmetic.row,
    "dialogue": dialogue.row,
    "pairs": pairs.row,
    "associations": associations.row,
}

FITS: dict[str, int] = {
    "niah": niah.FITS,
    "needles": niah.FITS,
    "tracking": tracking.FITS,
    "chains": tracking.MANY_FITS,
    "cwe": words.CWE_FITS,
    "fwe": words.FWE_FITS,
    "stories": stories.FITS,
    "labels": labels.FITS,
    "rerank": rerank.FITS,
    "arithmetic": arithmetic.FITS,
    "dialogue": dialogue.FITS,
    "pairs": pairs.FITS,
    "associations": associations.FITS,
}
"""Tokens from which on at least 95 rows of 100 draws are not None."""

SHARES: dict[str, float] = {
    "niah": 0.22,
    "needles": 0.0,
    "tracking": 0.12,
    "chains": 0.0,
    "cwe": 0.06,
    "fwe": 0.06,
    "stories": 0.16,
    "labels": 0.10,
    "rerank": 0.05,
    "arithmetic": 0.08,
    "dialogue": 0.06,
    "pairs": 0.05,
    "associations": 0.04,
}
"""A mixture to begin with; what a task is drawn for among those that fit."""


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
      ValueError: when ``shares`` names no task.
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
