"""The CPU benchmark: operations beside dense forms, called in turns."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.kernels.operations import ALL, module
from pallas_kernels.measure.timing import laps


def run(only: str, shape: str) -> None:
    """Print a line for each operation, shape and dtype.

    Raises:
      ValueError: the operation has no such shape.
    """
    for op in [only] if only else ALL:
        its = module(op)
        sizes_of = its.BENCH
        if shape:
            known = its.BENCH | its.LARGE
            if shape not in known:
                raise ValueError(f"kernels --only {op} --shape {shape}: it has {', '.join(known)}.")
            sizes_of = {shape: known[shape]}
        for name, sizes in sizes_of.items():
            for dtype in its.DTYPES:
                bench = its.on_cpu(sizes, dtype)
                times = in_turns(bench.runs, bench.repeats)
                print(line(op, name, dtype, times, bench.base, bench.most), flush=True)


def in_turns(
    runs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], repeats: int
) -> dict[str, float]:
    """Median seconds of each (function, arguments), compiled: one call of each in turn, ``repeats`` times.

    In turns, so that a busy machine slows all of them equally.
    """
    calls = {name: functools.partial(jax.jit(run), *args) for name, (run, args) in runs.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    rounds = [{name: laps(call, 1)[0] for name, call in calls.items()} for _ in range(repeats)]
    return {name: statistics.median(x[name] for x in rounds) for name in runs}


def line(
    op: str,
    shape: str,
    dtype: str,
    times: Mapping[str, float],
    base: str,
    most: Mapping[str, float] | None = None,
) -> str:
    """Milliseconds of each, the ratio of each to ``base``, and whether that is at most ``most``."""

    def cell(name: str) -> str:
        ratio, bound = times[name] / times[base], (most or {}).get(name)
        target = "" if bound is None else f", at most {bound}: {'met' if ratio <= bound else 'MISSED'}"
        return f"{name} {times[name] * 1e3:.2f} ms ({ratio:.2f}x{target})"

    return f"{op:14} {shape:12} {dtype:9} " + "  ".join(cell(name) for name in times)
