"""What an operation's ``work.py`` is made of: shapes with tags, calls to compile, check and time.

Tests, the compile gate (``bench --static``), the CPU benchmark (``bench``) and the device bench
(``bench --device``) all walk these.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from pallas_kernels import numerics

OPERATIONS = ("ragged_decode", "blockwise", "decode_step", "vertical_slash", "gated", "phi")
"""Of the device bench, by how much depends on them. ``merge`` has no body of its own."""

HOPPERS = ("h200",)
"""Chips that bodies in Mosaic GPU are written for."""

Run = Callable[[str], Callable[..., Any]]
"""The name of an implementation to the function to call."""

S = TypeVar("S")


class Shapes(dict[str, S], Generic[S]):
    """Named shapes, each with the tags of what uses it.

    ``test``, ``blocked``: tests of every implementation. ``bench``: the CPU benchmark; ``large``: that too,
    when named. ``chip``: compiled ahead of time. ``check``, ``tiny``, ``timed``: of the device bench,
    agreement, its rehearsal on a CPU, times.
    """

    def __init__(self, *entries: tuple[str, str, S]) -> None:
        super().__init__((name, shape) for _, name, shape in entries)
        self.tags = {name: frozenset(tags.split()) for tags, name, _ in entries}
        if len(self) < len(entries):
            raise ValueError(f"Shapes(...) names a shape twice: {[name for _, name, _ in entries]}.")

    def tagged(self, tag: str) -> dict[str, S]:
        """The shapes with a tag, in order."""
        return {name: shape for name, shape in self.items() if tag in self.tags[name]}


class Bench(NamedTuple):
    """A line of the CPU benchmark.

    Attributes:
      runs: (function, arguments), by what the line calls them.
      base: whose time the others are told in.
      most: of some, the most times ``base`` they may take.
      repeats: calls of each; the median counts.
    """

    runs: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
    base: str
    most: Mapping[str, float] = {}
    repeats: int = 15


class Case(NamedTuple):
    """One call to compile for chips, at the sizes of a served 8B model.

    Attributes:
      run: what to compile.
      args: its arguments, as shapes.
      moves: bytes that any implementation must read and write.
      flops: of products, that any implementation must do.
      temp: bound on the temporary bytes of the compiled program.
      whole: elements of the smallest operand that must not be copied; 0 when a layout costs a copy
        that the operation's documentation owns up to.
      step: (bytes, flops) of one step of the kernel's grid on a TPU, to hold its bundles against.
      kernel: name of that kernel.
      impl: the body, where it is not the platform's main one; then for its chips alone.
      pages: of that step on a TPU, where a loop in the kernel asks for them one by one.
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


class Check(NamedTuple):
    """Something to hold against the definition.

    Attributes:
      name: of the check.
      run: the function to call.
      args: its arguments.
      terms: of the longest sum in it.
      dtype: of the products.
    """

    name: str
    run: Run
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
    """Something to time on a device.

    Attributes:
      name: of the case.
      run: the function to call.
      args: its arguments.
      moves: bytes that any implementation must read and write; 0 where that says nothing.
      flops: of products, that any implementation must do; 0 where that says nothing.
      rivals: what to time beside it.
      tunes: the pass whose blocks are chosen by it, or "".
      key: dtype and head dim of that pass.
    """

    name: str
    run: Run
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
    """What ``<op>/work.py`` offers; ``merge`` ends after ``bench``."""

    SHAPES: Shapes[Any]
    DTYPES: tuple[str, ...]

    def bench(self, shape: Any, dtype: str) -> Bench:
        """What the CPU benchmark times of a shape."""

    def cases(self) -> dict[str, Case]:
        """What is compiled for chips."""

    def checks(self, tiny: bool) -> Iterator[Check]:
        """Agreement, at sizes that divide no block."""

    def searches(self, tiny: bool) -> Iterator[Job]:
        """Jobs that choose blocks, in order: a later one keeps what an earlier one chose."""

    def jobs(self, tiny: bool) -> Iterator[Job]:
        """Timings, and rivals to hold them against."""

    def targets(self, found: dict[str, Any], limits: dict[str, float]) -> list[Target]:
        """Targets from timed cases ("cases" and "compared" of a record), as far as those are there."""


def work(op: str) -> Work:
    """The work of an operation."""
    module: Any = importlib.import_module(f"pallas_kernels.{op}.work")
    return module


def operations() -> list[str]:
    """Folders that hold an operation."""
    return sorted(p.parent.name for p in pathlib.Path(__file__).parents[1].glob("*/api.py"))


def cases() -> dict[str, Case]:
    """All that is compiled for chips, by "operation/name"."""
    having = [op for op in operations() if op in OPERATIONS]
    return {f"{op}/{name}": case for op in having for name, case in work(op).cases().items()}


def beside() -> dict[str, Case]:
    """As ``cases``, of bodies besides the main ones, by "operation.body/name"."""
    found = {}
    for op in operations():
        for name, case in getattr(work(op), "beside", dict)().items():
            found[f"{op}.{case.impl}/{name}"] = case
    return found


def compiled_for(chip: str) -> dict[str, Case]:
    """``cases``, and those of ``beside`` that this chip can run."""
    return cases() | (beside() if chip in HOPPERS else {})


def size(*trees: Any) -> int:
    """Bytes of all arrays in trees of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


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
