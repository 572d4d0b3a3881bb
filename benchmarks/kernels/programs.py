"""What a compiled program shows without its chip: kernels, copies, registers that spill."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.measure.aot import Target, compiled, lowered, wheels


def digest(program: Any) -> str:
    """A lowered program's name: the same for the same program and the same compilers."""
    text = program.as_text() + repr(sorted(wheels().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class SpillsError(ValueError):
    """A GPU's assembler ran out of registers."""


def compiled_without_spills(
    chip: Target, run: Callable[..., Any], *args: Any, donated: tuple[int, ...] = ()
) -> Any:
    """``compiled``, where on a GPU no kernel may spill registers to memory.

    The CUDA assembler itself counts (``ptxas``: "bytes spill stores"); on a TPU nothing is checked.

    Raises:
      SpillsError: a kernel spills; XLA does not say which one, ``static.registers`` shows it.
    """
    if chip.platform != "gpu":
        return compiled(chip, run, *args, donated=donated)
    strict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    try:
        return lowered(chip, run, *args, donated=donated).compile(compiler_options=strict)
    except jax.errors.JaxRuntimeError as error:
        if "spill" not in str(error).lower():
            raise
        raise SpillsError(" ".join(str(error).split())[:300]) from error


NOTHING_MOVES = {
    *(
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "opt-barrier",
        "optimization-barrier",
    ),
    # Kernels; and what only holds other operations or ends one, which are seen where they begin.
    *("custom-call", "call", "call-start", "call-done", "while", "conditional"),
    *("copy-done", "async-done", "after-all"),
}
# Of tuples that hold sources too: (destination, source, ...) and ((source), destination, ...).
_DESTINATION = {"copy-start": slice(0, 1), "slice-start": slice(1, 2)}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*{$")
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]((?:\{[^}]*\})?)")


def launches(program: Any) -> int:
    """Kernels that one call of a compiled GPU program starts; those of a loop count once."""
    inside, looping = "", set(re.findall(r"(?:body|condition)=%?([\w.-]+)", program.as_text()))
    count = 0
    for line in program.as_text().splitlines():
        head, op = _HEAD.match(line), _OP.match(line)
        inside = ("ENTRY" if line.startswith("ENTRY") else head.group(1)) if head else inside
        if op and (inside == "ENTRY" or inside in looping):
            count += op.group(2) == "custom-call" or op.group(2) not in NOTHING_MOVES
    return count


def copies(program: Any, at_least: int, *, vmem: bool = False) -> list[str]:
    """Operations of a compiled program, kernels excluded, whose result has ``at_least`` elements in memory.

    What is inside a fusion is not in memory, the fusion's result is. What XLA brings to a TPU's VMEM
    (memory space 1) for its readers is read once and written nowhere: ``vmem`` asks for that instead, of
    operands of which a kernel reads parts.
    """
    text = program.as_text()
    fused = set(re.findall(r" fusion\(.*?calls=%?([\w.-]+)", text))
    operations, inside = [], ""
    for line in text.splitlines():
        head, op = _HEAD.match(line), _OP.match(line)
        inside = head.group(1) if head else inside
        if op is None or inside in fused or op.group(2) in NOTHING_MOVES:
            continue
        for dtype, dims, layout in _SHAPE.findall(op.group(1))[_DESTINATION.get(op.group(2), slice(None))]:
            if ("S(1)" in layout) is vmem and math.prod(int(x) for x in dims.split(",") if x) >= at_least:
                operations.append(f"{op.group(2)} {dtype}[{dims}]")
                break
    return operations
