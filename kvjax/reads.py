"""Reads of a prompt in a decode step, in tokens (K and V of one position in the model's dtype) a KV head.

The count of Hoshi et al., Top-K Retrieval with Fixed-Size Linear-Attention Completion (6.3, appendix D),
https://arxiv.org/abs/2604.05438: anchors and retrieved tokens each step, φ's summary once a request. The
paper's summary has the dtype of the cache; ours is float32, so that subtraction cancels, and ``wide`` is
the ratio of the two. Anchors that alone exceed a budget make it infeasible.

  budget of a share f of N tokens   n = ceil(f N)
  selection alone retrieves         n - ends
  beside φ                          floor(n - ends - R / generated),  R = wide (F / 2 + F / D)
"""

from __future__ import annotations

import math
from fractions import Fraction

ENDS = 20
"""First and last tokens of a prompt that every read sees: 4 and 16."""


def budget(share: float, prompt: int) -> int:
    """Tokens a step may read: the share's ceiling, without a rounding of the product."""
    return math.ceil(Fraction(repr(share)) * prompt)


def summary(features: int, head_dim: int, *, wide: float = 1.0) -> float:
    """R, tokens that reading φ once costs: F weights, F shifts and F values of D.

    Args:
      features: F, or 0 without φ.
      head_dim: D.
      wide: bytes of a number of the summary over those of the cache; 1 is the paper's count.
    """
    return wide * (features / 2 + features / head_dim)


def retrieved(
    share: float,
    prompt: int,
    *,
    features: int = 0,
    head_dim: int = 1,
    generated: int = 1,
    ends: int = ENDS,
    wide: float = 1.0,
) -> int | None:
    """Tokens of the middle that a step may retrieve within a budget; None where it is infeasible.

    Args:
      share, prompt: of the budget.
      features, head_dim, wide: as in ``summary``.
      generated: steps over which reading φ once is spread; 1 charges it at once.
      ends: tokens that are always read.
    """
    left = budget(share, prompt) - ends - summary(features, head_dim, wide=wide) / generated
    return None if left < 0 else math.floor(left)


def written(count: int | None) -> str:
    """A number for a table; "–" where the budget is infeasible."""
    return "–" if count is None else str(count)
