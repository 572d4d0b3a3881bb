"""The budget over the length of the answer: reading φ once is spread over the steps that use it.

Tokens retrieved within a share of the prompt (``kvjax.reads``), and the mean error of all heads' output that
``heads`` found at so many, linear between its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax import reads

SHARES = (0.03, 0.04, 0.06, 0.08, 0.12)
GENERATED = (1, 2, 4, 8, 16, 64, 256)

Found = dict[str, Any]


def rows(heads: Found, shares: Sequence[float] = SHARES, steps: Sequence[int] = GENERATED) -> list[Found]:
    """A row a share: what selection alone retrieves, and what is left beside φ by steps; None: infeasible.

    Args:
      heads: of a prompt's middle, as ``heads.measure`` gives it.
      shares: of the prompt, read a step.
      steps: over which reading φ is spread.
    """
    prompt, entries = heads["prompt"], []
    for share in shares:
        alone = reads.retrieved(share, prompt)
        left = [_beside(heads["summary"], share, prompt, count) for count in steps]
        entries.append(
            {
                "prompt": prompt,
                "share": share,
                "alone": alone,
                "alone_error": error(heads, "alone", alone),
                "steps": list(steps),
                "completed": left,
                "completed_error": [error(heads, "completed", count) for count in left],
            }
        )
    return entries


def _beside(summary: float, share: float, prompt: int, generated: int) -> int | None:
    """``reads.retrieved`` of a summary that is known in tokens."""
    left = reads.budget(share, prompt) - reads.ENDS - summary / generated
    return None if left < 0 else int(left)


def error(heads: Found, what: str, count: int | None) -> float | None:
    """Mean relative error of all heads where so many tokens are read; None for None."""
    if count is None:
        return None
    means = [float(np.mean(one)) for one in heads["by_head"][what]]
    return float(np.interp(count, heads["counts"], means))
