"""Times of functions taken in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def in_turns(
    runs: Mapping[str, Callable[..., Any]], args: Mapping[str, tuple[Any, ...]], repeats: int
) -> dict[str, float]:
    """Median seconds of each function after compiling: one call of each in turn, ``repeats`` times."""
    compiled = {name: jax.jit(run) for name, run in runs.items()}
    for name, run in compiled.items():
        jax.block_until_ready(run(*args[name]))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args[name]))
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def report(
    op: str,
    shape: str,
    dtype: str,
    times: Mapping[str, float],
    base: str,
    most: Mapping[str, float] | None = None,
) -> str:
    """One line: milliseconds of each, the ratio of each to ``base``, and whether that is at most ``most``."""

    def cell(name: str) -> str:
        ratio, bound = times[name] / times[base], (most or {}).get(name)
        target = "" if bound is None else f", at most {bound}: {'met' if ratio <= bound else 'MISSED'}"
        return f"{name} {times[name] * 1e3:.2f} ms ({ratio:.2f}x{target})"

    return f"{op:14} {shape:12} {dtype:9} " + "  ".join(cell(name) for name in times)
