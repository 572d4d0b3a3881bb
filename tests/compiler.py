"""XLA's short way: nearly all of the suite is the compilation of programs that run once.

With LLVM in a hurry, without fusion emitters and without splitting a program for parallel code generation,
the code of a decode step is made in a third of the CPU time. What is computed stays the same, how fast it
runs does not.

XLA ends the process at a flag that it does not know, so each is given only to versions that were seen to
take it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
from jax.stages import Compiled, Lowered

# flag: (short, as shipped, first version of jaxlib that was not seen to take it)
_FLAGS: dict[str, tuple[Any, Any, tuple[int, int]]] = {
    "xla_cpu_use_fusion_emitters": (False, True, (0, 11)),
    "xla_cpu_parallel_codegen_split_count": (1, 32, (0, 13)),
}
_HURRY = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def _taken() -> dict[str, tuple[Any, Any]]:
    release = tuple(int(part) for part in version("jaxlib").split(".")[:2])
    return {name: (short, shipped) for name, (short, shipped, end) in _FLAGS.items() if release < end}


def take_the_short_way() -> None:
    """For this process and those that it starts, before anything is compiled.

    What the user wrote into XLA_FLAGS rules.
    """
    os.environ.update(short_way())
    jax.config.update("jax_disable_most_optimizations", in_a_hurry())


def short_way() -> dict[str, str]:
    """What a process that is started finds in its environment to take it."""
    flags_set = os.environ.get("XLA_FLAGS", "")
    flags = [
        f"--{name}={str(short).lower()}" for name, (short, _) in _taken().items() if name not in flags_set
    ]
    return {"XLA_FLAGS": " ".join([flags_set, *flags]).strip(), _HURRY: os.environ.get(_HURRY, "1")}


def in_a_hurry() -> bool:
    """Is LLVM to do no more than it must in the whole run?"""
    return os.environ.get(_HURRY, "0").lower() in ("1", "true")


def compiled_in_full(lowered: Lowered) -> Compiled:
    """The program with the HLO and the buffers it has outside of the tests, for those that read it.

    Machine code alone is made in a hurry: the text of the HLO is the same at every level of LLVM.
    """
    options = {name: shipped for name, (_, shipped) in _taken().items()}
    return lowered.compile(
        options | {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    )


_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")
_NOT_WRITTEN = ("parameter", "get-tuple-element", "bitcast", "constant")


def written(text: str) -> Iterator[tuple[str, int, str]]:
    """(dtype, entries, line) of each array that a program writes; what is inside a fusion never exists."""
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", text))
    computation = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = head[1]
        elif computation not in fused and (made := _INSTRUCTION.match(line)) and made[3] not in _NOT_WRITTEN:
            yield made[1], math.prod(int(size) for size in made[2].split(",") if size), line.strip()
