"""Recall of needles: the share of numbers hidden in a text that greedy decoding would write when asked.

A needle counts as found when every token of its number is the likeliest one given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from train.rows import ANSWER, Source, needle_row

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where the needle stands, from the start of the text."""

Score = Callable[[np.ndarray, np.ndarray], "tuple[jax.Array, jax.Array]"]
"""``(tokens [B, T], row-major positions [S])`` to the negative log likelihood [S] of the token after each
position, and whether it is the likeliest [S]."""


def needle_recall(
    score: Score, source: Source, *, length: int, keys: int, count: int, seed: int
) -> np.ndarray:
    """Which needles a model finds, by depth.

    Args:
      score: the model.
      source: text and key words of the rows; held-out ones for a claim.
      length: tokens of a row, answer included.
      keys: needles in a row, one of them asked for.
      count: rows; depths take turns.
      seed: of the rows, which are the same for every model.

    Returns:
      bool [5, count / 5], one row per depth of ``DEPTHS``.

    Raises:
      ValueError: when needles and question do not fit into ``length`` tokens.
    """
    rows = []
    for i in range(count):
        rng = np.random.default_rng((seed, length, keys, i))
        depth = DEPTHS[i % len(DEPTHS)]
        draws = (needle_row(rng, source, length, keys=keys, depth=depth) for _ in range(100))
        row = next((row for row in draws if row is not None), None)  # two keys may fall on the same words
        if row is None:
            raise ValueError(
                f"needle_recall(length={length}, keys={keys}) leaves no room for text in {length} tokens. "
                "Ask for longer rows or fewer keys."
            )
        rows.append(row)
    answer = int((rows[0][1] >= ANSWER).sum())
    recalled: list[bool] = []
    step = max(1, min(count, 8192 // length))
    for first in range(0, count, step):
        tokens = np.stack([row for row, _ in rows[first : first + step]])
        real = len(tokens)
        tokens = np.pad(tokens, ((0, step - real), (0, 0)))
        at = (np.arange(step)[:, None] * length + np.arange(length - answer - 1, length - 1)).ravel()
        right = np.asarray(score(tokens, at)[1]).reshape(step, answer)
        recalled += np.all(right[:real], axis=-1).tolist()
    return np.asarray(recalled).reshape(-1, len(DEPTHS)).T
