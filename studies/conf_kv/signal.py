"""What confidence knows of a cache: how long it lasts, what it foretells of more slots' gain, its inverse.

Where all three say nothing, no test of CONF-KV's schedule on this model and text can decide its claim.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.eval.report import stats

LAGS = (1, 4, 16)
HORIZONS = (1, 4, 16, 64)


def autocorrelation(sure: np.ndarray, lag: int) -> float:
    """Of the windows' steps [W, T] about the mean of all, -1 to 1."""
    apart = sure - sure.mean()
    return float((apart[:, :-lag] * apart[:, lag:]).mean() / (apart * apart).mean())


def ahead(gain: np.ndarray, horizon: int) -> np.ndarray:
    """Mean gain of each step and those behind it, ``horizon`` in all: [W, T] -> [W, T - horizon + 1]."""
    total = np.cumsum(np.pad(gain, ((0, 0), (1, 0))), axis=1)
    return (total[:, horizon:] - total[:, :-horizon]) / horizon


def correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Pearson's r over all steps, with its interval over rows."""

    def of(at: np.ndarray) -> np.ndarray:
        return np.asarray([np.corrcoef(x[rows].ravel(), y[rows].ravel())[0, 1] for rows in np.atleast_2d(at)])

    low, high = stats.spread(of, len(x)) if len(x) > 1 else (float("nan"), float("nan"))
    return float(of(np.arange(len(x)))[0]), low, high


def foretold(sure: np.ndarray, tight: np.ndarray, loose: np.ndarray) -> dict[str, Any]:
    """How confidence lasts and what it foretells.

    Args:
      sure: the confidence that decided each step, [W, T].
      tight, loose: nats of each step's token under constant budgets of these sizes, [W, T].

    Returns:
      ``autocorrelation`` by lag, ``gain`` (nats a token that loose gains over tight), ``gain_correlation`` by
      horizon: Pearson's r of confidence and that gain over the next steps, with its interval over windows.
    """
    gain = tight - loose
    return {
        "autocorrelation": {str(lag): autocorrelation(sure, lag) for lag in LAGS if lag < sure.shape[1]},
        "gain": float(gain.mean()),
        "gain_correlation": {
            str(h): correlation(sure[:, : sure.shape[1] - h + 1], ahead(gain, h))
            for h in HORIZONS
            if h < sure.shape[1]
        },
    }


def inverse(targets: np.ndarray, sure: np.ndarray) -> np.ndarray:
    """A window's targets [T] dealt out the other way round: the least sure steps get the smallest."""
    dealt = np.empty_like(targets)
    dealt[np.argsort(sure, kind="stable")] = np.sort(targets)
    return dealt
