"""What is checked, tuned and timed of an operation on a device; each operation's own is beside this file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from pallas_kernels import numerics

OPERATIONS = ("ragged_decode", "blockwise", "vertical_slash", "gated", "phi")
"""By how much depends on them. ``merge`` has no body of its own."""


class Check(NamedTuple):
    """Something to hold against the definition.

    Attributes:
      name: of the check.
      run: an implementation's name to the function to call.
      args: its arguments.
      terms: of the longest sum in it.
      dtype: of the products.
    """

    name: str
    run: Callable[[str], Callable[..., Any]]
    args: tuple[Any, ...]
    terms: int
    dtype: str


class Rival(NamedTuple):
    """Another implementation, of the same thing or of one that does its work.

    Attributes:
      name: of it.
      prepare: given our implementation's name, a warm call without arguments; raises where it cannot run.
      wait: returns when the work behind a call's result is done.
      like: its result as ours is laid out, to see that it is the same; None where it is another thing.
    """

    name: str
    prepare: Callable[[str], Callable[[], Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    like: Callable[[Any], Any] | None = None


class Job(NamedTuple):
    """Something to time.

    Attributes:
      name: of the case.
      run: an implementation's name to the function to call.
      args: its arguments.
      moves: bytes that any implementation must read and write; 0 where that says nothing.
      flops: of products, that any implementation must do; 0 where that says nothing.
      rivals: what to time beside it.
      tunes: the pass whose blocks are chosen by it, or "".
      key: dtype and head dim of that pass.
    """

    name: str
    run: Callable[[str], Callable[..., Any]]
    args: tuple[Any, ...]
    moves: int = 0
    flops: int = 0
    rivals: tuple[Rival, ...] = ()
    tunes: str = ""
    key: tuple[str, int] = ("", 0)


class Target(NamedTuple):
    """What a device should reach: a ratio of two measured numbers and its bound."""

    name: str
    ratio: float
    bound: float
    least: bool

    def said(self) -> dict[str, Any]:
        """For the record."""
        met = self.ratio >= self.bound if self.least else self.ratio <= self.bound
        return {
            "ratio": round(self.ratio, 3),
            "at least" if self.least else "at most": self.bound,
            "met": met,
        }


class Work(Protocol):
    """What a module of this folder that is named like an operation offers."""

    def checks(self, tiny: bool) -> Iterator[Check]:
        """Agreement, at sizes that divide no block."""

    def searches(self, tiny: bool) -> Iterator[Job]:
        """Jobs that choose blocks, in order: a later one keeps what an earlier one chose."""

    def jobs(self, tiny: bool) -> Iterator[Job]:
        """Timings, and rivals to hold them against."""

    def targets(self, found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
        """Targets from timed cases ("cases" and "compared" of a record), as far as those are there."""


def work(op: str) -> Work:
    """The module of an operation."""
    module: Any = importlib.import_module(f"pallas_kernels.device.{op}")
    return module


def agreement(found: Any, wanted: Any, terms: int, dtype: str) -> dict[str, Any]:
    """Errors against the definition in float32, and whether they are within ``numerics``.

    16-bit products round every operand to 8 bits: their error may be 2 ** -8 of the largest value,
    grown as sums of rounding errors grow.
    """
    tolerance = numerics.float32(terms) if dtype == "float32" else 2.0**-8 * (1 + np.log2(terms) / 4)
    errors = []
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        if ours.shape != theirs.shape:
            return {"agrees": False, "why": f"shapes {ours.shape} and {theirs.shape}"}
        if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
            return {"agrees": False, "why": "infinities differ"}
        finite = np.isfinite(theirs)
        largest = max(1.0, float(np.abs(theirs[finite]).max(initial=0)))
        errors.append(float(np.abs(ours[finite] - theirs[finite]).max(initial=0)) / largest)
    return {"agrees": bool(max(errors) <= tolerance), "errors": errors, "tolerance": float(tolerance)}
