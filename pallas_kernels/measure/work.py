"""What ``<op>/work.py`` is made of: checks against the definition, and calls that choose blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics

OPERATIONS = ("ragged_decode", "blockwise", "decode_step", "vertical_slash", "gated", "phi")
"""Measured on a device, by how much depends on them. ``merge`` has no body of its own."""

Run = Callable[[str], Callable[..., Any]]
"""The name of an implementation to the function to call."""


class Check(NamedTuple):
    """A call to compare with ``ref``.

    Attributes:
      name: of the check.
      run: the function to call.
      args: its arguments.
      terms: number of terms of the longest sum in it.
      dtype: of the products.
    """

    name: str
    run: Run
    args: tuple[Any, ...]
    terms: int
    dtype: str


class TimedCall(NamedTuple):
    """A call to time on a device.

    Attributes:
      name: of the case.
      run: the function to call.
      args: its arguments.
      moves: bytes that any implementation must read and write; 0 if unknown.
      flops: of products that any implementation must do; 0 if unknown.
      tunes: the pass whose blocks this call chooses, or "".
      key: dtype and head dim of that pass.
    """

    name: str
    run: Run
    args: tuple[Any, ...]
    moves: int = 0
    flops: int = 0
    tunes: str = ""
    key: tuple[str, int] = ("", 0)


def work(op: str) -> Any:
    """The module ``<op>/work.py``.

    Its ``checks(tiny)`` yields ``Check``; its ``searches(tiny)`` yields ``TimedCall`` in the order in which
    blocks are chosen: a later call keeps the blocks that an earlier one chose.
    """
    return importlib.import_module(f"pallas_kernels.{op}.work")


def size(*trees: Any) -> int:
    """Bytes of all arrays in trees of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def gradient_of_sum(run: Callable[..., Any], order: tuple[int, ...] = (0, 1, 2)) -> Callable[..., Any]:
    """The gradient of the sum of ``run``, as every gradient is timed."""
    return jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), order)


def agreement(results: Any, expected: Any, terms: int, dtype: str) -> dict[str, Any]:
    """Errors against the definition in float32, and whether they are within ``numerics``.

    16-bit products round every operand to 8 bits: their error may be 2 ** -8 of the largest value,
    grown as sums of rounding errors grow.
    """
    tolerance = numerics.float32(terms) if dtype == "float32" else 2.0**-8 * (1 + np.log2(terms) / 4)
    errors = []
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        if ours.shape != theirs.shape:
            return {"agrees": False, "why": f"shapes {ours.shape} and {theirs.shape}"}
        if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
            return {"agrees": False, "why": "infinities differ"}
        finite = np.isfinite(theirs)
        largest = max(1.0, float(np.abs(theirs[finite]).max(initial=0)))
        errors.append(float(np.abs(ours[finite] - theirs[finite]).max(initial=0)) / largest)
    return {"agrees": bool(max(errors) <= tolerance), "errors": errors, "tolerance": float(tolerance)}
