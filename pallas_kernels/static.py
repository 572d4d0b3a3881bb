"""What can be known of a kernel without a device: its instructions and spills, held against the roofline.

TPU: libtpu writes the final VLIW bundles of every kernel, about one a cycle while nothing waits for
memory. The count is of the program text: a loop inside the kernel (the copies of ragged_decode's pages)
counts once, and so do steps that run only at the ends of a row. GPU: whether the assembler had to
spill registers.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

MARK = "static: "


class Chip(NamedTuple):
    """Of one device (v5p: of one of its two cores): GB/s of memory, 16-bit TFLOP/s, clock in GHz.

    TPU numbers are those of JAX's own table (``pltpu.get_tpu_info_for_chip``), clocks follow from
    its TFLOP/s and the sizes of the matrix units; H200: data sheet.
    """

    bandwidth: float
    flops: float
    clock: float


CHIPS = {
    "v5e": Chip(820, 197, 1.5),
    "v5p": Chip(1230, 229, 1.75),
    "v6e": Chip(1640, 920, 1.75),
    "tpu7x": Chip(3700, 1155, 2.2),
    "h200": Chip(4800, 990, 1.98),
}


def roofline(chip: str, moves: int, flops: int) -> float:
    """Seconds below which no program can move these bytes and do these products."""
    limit = CHIPS[chip]
    return max(moves / (limit.bandwidth * 1e9), flops / (limit.flops * 1e12))


def report(chip: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case compiled for a chip, in one process of its own (compilers read their flags once)."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        flags = {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": dump, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "pallas_kernels.static", chip, folder, *names]
        with subprocess.Popen(command, env=os.environ | flags, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                if line.startswith(MARK):
                    name, result = json.loads(line[len(MARK) :])
                    yield name, result
        if child.returncode:
            raise RuntimeError(
                f"the compiler for {chip} ended with code {child.returncode}; see its messages"
            )


def bundles(folder: pathlib.Path) -> dict[str, int]:
    """Bundles of each kernel whose dump lies in a folder."""
    found = {}
    for file in sorted(folder.glob("*schedule-analysis_final_bundles.txt")):
        kernel = re.search(
            r"(ragged_decode_\w+?|blockwise\w*?|column_mass|gated\w*?|vertical\w*?|phi\w*?)[.-]", file.name
        )
        count = re.search(r"total scheduled bundles:\s+(\d+)", file.read_text())
        if kernel and count:
            found[kernel.group(1)] = int(count.group(1))
    return found


def _one(chip: str, name: str, folder: pathlib.Path) -> dict[str, Any]:
    from pallas_kernels import aot
    from pallas_kernels.cases import cases

    case, place = cases()[name], aot.target(chip)
    for file in folder.iterdir():
        file.unlink()
    found: dict[str, Any] = {"impl": place.impl, "moves_bytes": case.moves, "flops": case.flops}
    found["roofline_us"] = round(roofline(chip, case.moves, case.flops) * 1e6, 2)
    program = aot.compiled(place, case.run(place.impl), *case.args)
    found["temp_bytes"] = program.memory_analysis().temp_size_in_bytes
    if place.platform == "tpu":
        found["bundles"] = bundles(folder)
        if case.kernel in found["bundles"]:
            step = found["bundles"][case.kernel] / (CHIPS[chip].clock * 1e9)
            found["step_to_roofline"] = round(step / roofline(chip, *case.step), 2)
    else:
        found["spills"] = not aot.fits_registers(place, case.run(place.impl), *case.args)
    return found


def main() -> None:
    """``chip folder case...``: one line of output a case."""
    chip, folder, *names = sys.argv[1:]
    for name in names:
        try:
            found = _one(chip, name, pathlib.Path(folder))
        except (RuntimeError, ValueError, NotImplementedError) as reason:
            found = {"error": " ".join(str(reason).split())[:300]}
        print(MARK + json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main()
