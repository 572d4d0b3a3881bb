"""Ragged prompts for the oracles of methods that score a prompt: grouped heads, and padding that would win.

Large queries and keys make attention peaked, so that two scores are never nearly the same. Padding is
full of what everybody would look at and nobody may: large equal numbers, or NaN.
"""

from __future__ import annotations

import numpy as np
from policy_oracle import best, judge, kept, observe

from kvjax.algebra import Observation, Policy

LENGTHS, T, N, K, H = (40, 25, 6, 1), 40, 4, 2, 8
G = N // K
_random = np.random.default_rng(1)
Q = 1.5 * _random.standard_normal((len(LENGTHS), N, T, H))
KEYS = 1.5 * _random.standard_normal((len(LENGTHS), K, T, H))
VALUES = _random.standard_normal((len(LENGTHS), K, T, H)) * _random.lognormal(size=(len(LENGTHS), K, T, 1))


def padded(x: np.ndarray, value: float) -> np.ndarray:
    x = x.copy()
    for row, end in enumerate(LENGTHS):
        x[row, :, end:] = value
    return x


def prompts(padding: float = 9.0, **more: np.ndarray) -> Observation:
    """The rows as a layer sees them."""
    values = {"q": Q, "k": KEYS, "v": VALUES, **more}
    return observe(LENGTHS, T, **{name: padded(x, padding) for name, x in values.items()})


def attention(row: int, n: int, softcap: float = np.inf) -> np.ndarray:
    """[length, length] of one query head, float64: softmax over all keys up to the query's own."""
    length = LENGTHS[row]
    s = Q[row, n, :length] @ KEYS[row, n // G, :length].T / np.sqrt(H)
    s = s if softcap == np.inf else softcap * np.tanh(s / softcap)
    s = np.where(np.tri(length, dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def target_of(amount: int | float, length: int) -> int:
    return amount if isinstance(amount, int) else int(np.floor(amount * length + 0.5))


def gap(score: np.ndarray, length: int, target: int, sinks: int, newest: int) -> float:
    """How far the last unprotected token that stays is from the first that goes; equal is told apart."""
    free = np.sort(score[sinks : max(length - newest, sinks)])[::-1]
    last = target - (length - len(free)) - 1
    return np.inf if not 0 <= last < len(free) - 1 else free[last] - free[last + 1]


def keeps_the_best(
    policy: Policy, right: list[np.ndarray], *, sinks: int = 0, newest: int = 0, ties: bool = False
) -> None:
    """The policy (with a uniform budget) keeps what scores [K, length] of each row say, whatever pads them.

    Unless ``ties``, the scores must decide clearly: a selection that rounding decides proves nothing.
    """
    for padding in (9.0, np.nan):
        bits = judge(policy, prompts(padding))
        for row, length in enumerate(LENGTHS):
            target = target_of(policy.budget.amount, length)
            for h, score in enumerate(right[row]):
                assert ties or gap(score, length, target, sinks, newest) > 1e-6
                assert kept(bits[row, h]) == best(score, length, target, sinks=sinks, newest=newest)
