"""Haystacks, and how needles go into them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.eval.tasks.maker import NOISE, Maker, Piece, Rng


def at_depth(maker: Maker, units: Sequence[str], depth: float) -> int:
    """How many units stand in front of a needle at ``depth`` (0 start, 1 end): moved back to a unit's end."""
    ends = np.cumsum([maker.count(" " + unit) for unit in units])
    if not len(ends):
        return 0
    return int(np.searchsorted(ends, depth * ends[-1] + 1e-9, side="right"))


def places(rng: Rng, count: int, gaps: int) -> list[int]:
    """``count`` sorted places among ``gaps``; distinct where there are enough."""
    return sorted(rng.choice(gaps, count, replace=gaps < count).tolist())


def depths(rng: Rng, count: int) -> np.ndarray:
    """``count`` different ones of 40 evenly spaced depths, sorted (RULER's)."""
    return np.sort(rng.permutation(40)[:count]) / 39


def woven(units: Sequence[str], needles: Sequence[tuple[int, Piece]], gap: str) -> list[Piece]:
    """Units with needles behind the given numbers of units, all separated by ``gap``."""
    pieces: list[Piece] = []
    waiting = sorted(needles, key=lambda needle: needle[0])
    for i in range(len(units) + 1):
        while waiting and waiting[0][0] <= i:
            text, marked = waiting.pop(0)[1]
            pieces += [(gap, False), (text, marked)]
        if i < len(units):
            pieces += [(gap, False), (units[i], False)]
    pieces += [piece for _, needle in waiting for piece in ((gap, False), needle)]
    return pieces[1:]


def noise(lines: int) -> list[str]:
    """Lines that say nothing."""
    return [" ".join(NOISE)] * lines
