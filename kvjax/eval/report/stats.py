"""Intervals: bootstrap over samples, paired where two policies saw the same ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000


@functools.lru_cache(maxsize=64)
def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def interval(
    values: Sequence[float], weights: Sequence[float] | None = None, *, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, lower, upper) of the 95 % bootstrap interval of a (weighted) mean.

    Of differences between two policies on the same samples it is a paired interval.
    """
    x = np.asarray(values, float)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    at = _draws(len(x), seed)
    means = (x * w)[at].sum(axis=1) / w[at].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float((x * w).sum() / w.sum()), float(low), float(high)


def spread(of: Callable[[np.ndarray], np.ndarray], count: int, *, seed: int = 0) -> tuple[float, float]:
    """(lower, upper) of the 95 % bootstrap interval of any statistic of ``count`` samples.

    Args:
      of: sample numbers [resamples, count] to the statistic of each resample; NaN where it is undefined.
      count: number of samples.
    """
    low, high = np.nanpercentile(of(_draws(count, seed)), [2.5, 97.5])
    return float(low), float(high)


def difference(
    values: Sequence[float], other: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """``interval`` of values minus other, pair by pair.

    Raises:
      ValueError: different numbers of samples.
    """
    if len(values) != len(other):
        raise ValueError(
            f"difference() pairs {len(values)} samples with {len(other)}. Give the same samples."
        )
    return interval(np.subtract(values, other).tolist(), weights)
