"""What compilers say of the step: operations that start, temporary memory, bundles of the kernels."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

CHIPS = ("v5e", "v6e", "v5p", "tpu7x", "h200")
FOLDER = tempfile.TemporaryDirectory()
# Before libtpu is loaded, which reads it once.
os.environ["LIBTPU_INIT_ARGS"] = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_category_filter=codegen "
    f"--xla_jf_dump_llo_pass_label_regex=final_bundles --xla_jf_dump_to={FOLDER.name}"
)

import jax  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels import lowering  # noqa: E402
from pallas_kernels.measure import aot, static  # noqa: E402
from studies.one_kernel import gpu, today, tpu  # noqa: E402
from studies.one_kernel.arrays import Sizes, shapes  # noqa: E402


class Costs(NamedTuple):
    """Of one compiled step.

    Attributes:
      launches: operations of the program that start, kernels among them.
      cycles: XLA's own estimate of all that are not Pallas kernels; 0 where it makes none (GPU).
      temp: bytes.
      kernels: of each Pallas kernel of a TPU, bundles outside loops that copy pages, and of those loops.
    """

    launches: int
    cycles: int
    temp: int
    kernels: dict[str, tuple[int, int]]


def forms(chip: str) -> dict[str, Callable[..., Any]]:
    """The step now, and as one kernel."""
    impl = aot.target(chip).impl
    return {"today": functools.partial(today.step, impl=impl), "one": (gpu if impl == "triton" else tpu).step}


def costs(chip: str, run: Callable[..., Any], sizes: Sizes) -> Costs:
    """Compile it, its cache donated; on a GPU no kernel may spill.

    Raises:
      JaxRuntimeError: the compiler refuses, or a kernel spills.
    """
    place, folder = aot.target(chip), pathlib.Path(FOLDER.name)
    device = SingleDeviceSharding(place.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes(sizes))
    for file in folder.iterdir():
        file.unlink()
    with lowering.for_device(place.kind, place.cores, place.platform):
        traced = jax.jit(run, donate_argnums=0).trace(*args)
        lowered = traced.lower(lowering_platforms=place.lowering)
    strict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    program = lowered.compile(compiler_options=strict if place.platform == "gpu" else None)
    cycles = sum(int(x) for x in re.findall(r'"estimated_cycles":"(\d+)"', _entry(program.as_text())))
    memory = program.memory_analysis()
    if memory.alias_size_in_bytes < sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0])):
        raise ValueError(f"the cache is not written in place: {memory}")
    found = {name: _loops(file) for name, file in _dumps(folder)}
    return Costs(aot.launches(program), cycles, memory.temp_size_in_bytes, found)


def _entry(text: str) -> str:
    return text[text.index("\nENTRY") :]


def _dumps(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """(kernel, its final bundles)."""
    found = []
    for file in sorted(folder.glob("*-01-final_bundles.txt")):
        if kernel := re.search(rf"({static.KERNEL})[.-]", file.name):
            found.append((kernel.group(1), file))
    return found


_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:?\s*(>*)[^{]*{")


def _loops(file: pathlib.Path) -> tuple[int, int]:
    """Bundles outside inner loops, and of the inner loops that start or await copies, once a turn."""
    pieces: list[list[Any]] = [["", 0, False]]
    for line in file.read_text().splitlines():
        if bundle := _BUNDLE.match(line):
            if bundle.group(1) or bundle.group(2) != pieces[-1][0]:
                pieces.append([bundle.group(2), 0, False])
            pieces[-1][1] += 1
            pieces[-1][2] |= "= dma." in line or "dma.done.wait" in line
    inner = [copies * count for depth, count, copies in pieces if len(depth) > 1]
    return sum(count for depth, count, _ in pieces if len(depth) < 2), sum(inner)
