"""GVote once more, in float64 NumPy and plain Python; only the draws come from JAX, by the rule they obey."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np


def noise(seed: int, request: int, layer: int, samples: int, width: int) -> np.ndarray:
    """[S, D] normal draws: of (policy seed, request seed, layer, voter) alone."""
    key = jax.random.PRNGKey(np.uint32(seed))
    for number in (request, layer):
        key = jax.random.fold_in(key, number)
    return np.stack([jax.random.normal(jax.random.fold_in(key, s), (width,)) for s in range(samples)])


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max())
    return e / e.sum()


def capped(s: np.ndarray, cap: float | None) -> np.ndarray:
    return s if cap is None else cap * np.tanh(s / cap)


def nucleus(share: np.ndarray, p: float) -> int:
    """The fewest of the largest whose sum reaches p."""
    total, count = 0.0, 0
    for x in sorted(share, reverse=True):
        total, count = total + x, count + 1
        if total >= p:
            break
    return count if p < 1 else len(share)


def ballots(
    k: np.ndarray,
    q_last: np.ndarray,
    hidden: np.ndarray,
    draws: np.ndarray,
    project: Callable[[np.ndarray], np.ndarray],
    turn: np.ndarray,
    p: float,
    cap: float | None = None,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """One row of one layer.

    Args:
      k: [K, T, H] keys of the row's real tokens.
      q_last: [N, H] of its last.
      hidden: [T, D].
      draws: [S, D].
      project: [S, D] to [S, N, H].
      turn: [H, H], turns a column to the averaged future position.
      p: nucleus.
      cap: of scores.
      allowed: [K, T] tokens that may stay; all by default.

    Returns:
      votes [K, T], how many keys each query head's voters name [N], and how far the closest decision was from
      falling the other way: rounding that decides proves nothing.
    """
    heads, length, h = k.shape
    group = len(q_last) // heads
    voters = project(hidden.mean(axis=0) + hidden.std(axis=0) * draws) @ turn.T
    votes, counts, margin = np.zeros((heads, length), int), np.zeros(len(q_last), int), np.inf
    for n in range(len(q_last)):
        positions = np.arange(length) if allowed is None else np.flatnonzero(allowed[n // group])
        keys = k[n // group][positions]
        share = softmax(capped(keys @ q_last[n] / np.sqrt(h), cap))
        counts[n] = b = nucleus(share, p)
        sums = np.cumsum(np.sort(share)[::-1])
        if p < 1:
            margin = min(margin, np.abs(sums - p).min())
        for voter in voters:
            s = keys @ voter[n] / np.sqrt(h)
            order = sorted(range(len(positions)), key=lambda t: (-s[t], t))
            votes[n // group, positions[order[:b]]] += 1
            if b < len(positions):
                margin = min(margin, s[order[b - 1]] - s[order[b]])
    return votes, counts, margin


def log_expectations(
    k: np.ndarray,
    hidden: np.ndarray,
    project: Callable[[np.ndarray], np.ndarray],
    turn: np.ndarray,
    group: int,
) -> np.ndarray:
    """[N, T] log E exp(q k / sqrt(H)) over the voters of one row of one layer.

    The exponent is affine in the draws: a + sum c_d n_d, whose mean exponential is exp(a + sum c_d^2 / 2). No
    covariance is formed. ``project`` is affine; the others as in ``ballots``.
    """
    mean, spread = hidden.mean(axis=0), hidden.std(axis=0)
    still = project(mean[None])[0] @ turn.T  # [N, H]
    steps = (project(mean + np.diag(spread)) - project(mean[None])) @ turn.T  # [D, N, H]
    keys = np.repeat(k, group, axis=0) / np.sqrt(k.shape[-1])  # [N, T, H]
    c = np.einsum("dnh,nth->dnt", steps, keys)
    return np.einsum("nh,nth->nt", still, keys) + (c**2).sum(axis=0) / 2


def expected(
    weight: np.ndarray, counts: np.ndarray | None, p: float, heads: int, sinks: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """What infinitely many voters name.

    Args:
      weight: [N, T] logarithms.
      counts: [N] keys that a head names; None: the fewest that hold ``p`` of its weight behind the sinks.
      p: nucleus.
      heads: K.
      sinks: first tokens, which have no share.

    Returns:
      votes [K, T], expected attention [K, T], margin as in ``ballots``.
    """
    share = np.zeros(weight.shape)
    if weight.shape[1] > sinks:
        share[:, sinks:] = np.stack([softmax(w[sinks:]) for w in weight])
    group, margin = len(weight) // heads, np.inf
    votes = np.zeros((heads, weight.shape[1]), int)
    for n, w in enumerate(weight):
        first = 0
        if counts is None:
            first = min(sinks, len(w))
            b = nucleus(share[n, first:], p) if first < len(w) else 0
            margin = min(margin, np.abs(np.cumsum(np.sort(share[n])[::-1]) - p).min()) if p < 1 else margin
        else:
            b = counts[n]
        order = sorted(range(first, len(w)), key=lambda t: (-w[t], t))
        votes[n // group, order[:b]] += 1
        if 0 < b < len(order):
            margin = min(margin, w[order[b - 1]] - w[order[b]])
    return votes, share.reshape(heads, group, -1).mean(axis=1), margin


def mean_count(
    k: np.ndarray, q: np.ndarray, p: float, queries: int, cap: float | None = None
) -> tuple[np.ndarray, float]:
    """[N] keys that hold ``p`` of a query's attention, mean over the last ``queries``, rounded up; margin.

    Args:
      k: [K, T, H].
      q: [N, T, H].
    """
    heads, length, h = k.shape
    counts, margin = np.zeros(len(q), int), np.inf
    for n in range(len(q)):
        keys, own = k[n // (len(q) // heads)], []
        for t in range(max(length - queries, 0), length):
            share = softmax(capped(keys[: t + 1] @ q[n, t] / np.sqrt(h), cap))
            own.append(nucleus(share, p))
            if p < 1 and t:
                margin = min(margin, np.abs(np.cumsum(np.sort(share)[::-1])[:-1] - p).min())
        counts[n] = -(-sum(own) // len(own))
    return counts, margin
