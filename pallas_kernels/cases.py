"""What is compiled ahead of time and costed: cases of every operation, at the sizes of a served 8B model.

An operation's folder may have ``cases.py`` with ``cases() -> dict[str, Case]``; everything that
compiles for chips (``tests/kernels/test_aot_ops.py``, ``bench --static``) walks these.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

HERE = pathlib.Path(__file__).parent


class Case(NamedTuple):
    """One call of one operation.

    Attributes:
      run: given the name of an implementation, the function to compile.
      args: its arguments, as shapes.
      moves: bytes that any implementation must read and write.
      flops: of products, that any implementation must do.
      temp: bound on the temporary bytes of the compiled program.
      whole: elements of the smallest operand that must not be copied; 0 when a layout costs a copy
        that the operation's documentation owns up to.
      step: (bytes, flops) of one step of the kernel's grid on a TPU, to hold its bundles against.
      kernel: name of that kernel.
    """

    run: Callable[[str], Callable[..., Any]]
    args: tuple[Any, ...]
    moves: int
    flops: int
    temp: int
    whole: int
    step: tuple[int, int]
    kernel: str


def operations() -> list[str]:
    """Folders that hold an operation."""
    return sorted(p.parent.name for p in HERE.glob("*/api.py"))


def cases() -> dict[str, Case]:
    """All cases, by "operation/name"."""
    found = {}
    for op in operations():
        if importlib.util.find_spec(f"pallas_kernels.{op}.cases") is None:
            continue
        for name, case in importlib.import_module(f"pallas_kernels.{op}.cases").cases().items():
            found[f"{op}/{name}"] = case
    return found


def size(*trees: Any) -> int:
    """Bytes of all arrays in trees of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))
