"""What the module of an operation in this package is made of, and where to find it.

A module has ``BENCH`` and ``LARGE`` (sizes by name: those of the CPU benchmark, and those it takes only when
named), ``DTYPES`` and ``on_cpu(sizes, dtype)``; all but ``merge`` also have ``cases()`` (compiled for chips),
``timings(tiny)`` and ``targets(record, limits)`` (on a device), and some ``mosaic_gpu_cases()``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pallas_kernels.measure.work import OPERATIONS, Run, TimedCall

ALL = tuple(sorted((*OPERATIONS, "merge")))

HOPPERS = ("h200",)
"""Chips that bodies in Mosaic GPU are written for."""


class CpuBench(NamedTuple):
    """A line of the CPU benchmark.

    Attributes:
      runs: (function, arguments) by name.
      base: name of the run that the others are compared with.
      most: bounds on the time of some runs, in times of ``base``.
      repeats: calls of each; the median counts.
    """

    runs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
    base: str
    most: Mapping[str, float] = {}
    repeats: int = 15


class CompiledCase(NamedTuple):
    """One call to compile for chips, at the sizes of a served 8B model.

    Attributes:
      run: what to compile.
      args: its arguments, as shapes.
      moves: bytes that any implementation must read and write.
      flops: of products, that any implementation must do.
      temp: bound on the temporary bytes of the compiled program.
      whole: elements of the smallest operand that must not be copied; 0 when the operation documents that
        this layout costs a copy.
      step: (bytes, flops) of one step of the kernel's grid on a TPU, to compare with its bundles.
      kernel: name of that kernel.
      impl: the body, if it is not the platform's main one; then compiled for its chips alone.
      pages: of that step on a TPU, if a loop in the kernel fetches them one by one.
      donated: arguments that are written in place.
    """

    run: Run
    args: tuple[Any, ...]
    moves: int
    flops: int
    temp: int
    whole: int
    step: tuple[int, int]
    kernel: str
    impl: str = ""
    pages: int = 0
    donated: tuple[int, ...] = ()


class Rival(NamedTuple):
    """Another implementation of the same function, or of one that does its work.

    Attributes:
      name: of it.
      prepare: given our implementation's name, a warm call without arguments; raises where it cannot run.
      wait: returns when the work behind a call's result is done.
      like: converts its result to the layout of ours, to compare them; None if it is another function.
    """

    name: str
    prepare: Callable[[str], Callable[[], Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    like: Callable[[Any], Any] | None = None


class Timing(NamedTuple):
    """A call to time on a device, and what to time beside it."""

    call: TimedCall
    rivals: tuple[Rival, ...] = ()


class Target(NamedTuple):
    """What a device should reach: a ratio of two measured numbers and its bound."""

    name: str
    ratio: float
    bound: float
    least: bool

    def row(self) -> dict[str, Any]:
        """The target as the record has it."""
        met = self.ratio >= self.bound if self.least else self.ratio <= self.bound
        return {
            "ratio": round(self.ratio, 3),
            "at least" if self.least else "at most": self.bound,
            "met": met,
        }


def module(op: str) -> Any:
    """The module of an operation."""
    return importlib.import_module(f"benchmarks.kernels.{op}")


def cases() -> dict[str, CompiledCase]:
    """Everything that is compiled for chips, by "operation/name"."""
    return {f"{op}/{name}": case for op in sorted(OPERATIONS) for name, case in module(op).cases().items()}


def mosaic_gpu_cases() -> dict[str, CompiledCase]:
    """The cases of bodies in Mosaic GPU, by "operation.body/name"."""
    return {
        f"{op}.{case.impl}/{name}": case
        for op in ALL
        for name, case in getattr(module(op), "mosaic_gpu_cases", dict)().items()
    }


def compiled_for(chip: str) -> dict[str, CompiledCase]:
    """``cases``, and those of ``mosaic_gpu_cases`` that this chip can run."""
    return cases() | (mosaic_gpu_cases() if chip in HOPPERS else {})
