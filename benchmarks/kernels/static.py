"""What is known of a kernel without a device: instructions, registers, spills, compared with the roofline.

TPU: libtpu writes the final VLIW bundles of every kernel, about one a cycle while nothing waits for
memory. The count is of the program text: a loop inside the kernel counts once, and so do steps that run
only at the ends of a row; ``steps`` distinguishes them, ``item`` counts the loop that asks for the pages of
ragged_decode's next item as often as it runs, ``spills`` vector registers that went to memory and back. GPU:
registers of a thread and bytes spilled, as CUDA's assembler says.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pallas_kernels.measure.child import Child, answer


class ChipLimits(NamedTuple):
    """Of one device (v5p: of one of its two cores): GB/s of memory, 16-bit TFLOP/s, clock in GHz.

    TPU numbers are those of JAX's own table (``pltpu.get_tpu_info_for_chip``), clocks follow from
    its TFLOP/s and the sizes of the matrix units; H200: data sheet.
    """

    bandwidth: float
    flops: float
    clock: float


CHIPS = {
    "v5e": ChipLimits(820, 197, 1.5),
    "v5p": ChipLimits(1230, 229, 1.75),
    "v6e": ChipLimits(1640, 920, 1.75),
    "tpu7x": ChipLimits(3700, 1155, 2.2),
    "h200": ChipLimits(4800, 990, 1.98),
}


GPUS = {"h200"}


def roofline(chip: str, moves: int, flops: int) -> float:
    """Seconds below which no program can move these bytes and do these products."""
    limit = CHIPS[chip]
    return max(moves / (limit.bandwidth * 1e9), flops / (limit.flops * 1e12))


def report(
    chip: str, names: list[str], known: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case compiled for a chip, in one process of its own (compilers read their flags once).

    Args:
      chip: one of ``CHIPS``.
      names: of the cases.
      known: earlier results; what has not changed since is not compiled again, nor is a program twice.

    Raises:
      LostError: the process ended before its time.
    """
    full = "kernels" if chip in GPUS else "bundles"
    programs = {x["program"]: x for x in known.values() if "program" in x and full in x}
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"{DUMPS}{folder}",
            # The assembler's own report, which XLA passes on at this level of detail only.
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "subprocess_compilation=5",
            # Mosaic GPU calls the assembler itself.
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        log = pathlib.Path(folder) / REPORT
        with Child.running("benchmarks.kernels.static", chip, folder, env=flags, errors=log) as compiler:
            compiler.tell([names, programs])
            for _ in names:
                yield compiler.hear()


REPORT = "report"
"""The file with what the assembler writes to standard error."""

# Nothing but the last bundles.
DUMPS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_category_filter=codegen "
    "--xla_jf_dump_llo_pass_label_regex=final_bundles --xla_jf_dump_to="
)
MEASURED = ("compile_s", "temp_bytes", "copies", "launches", "bundles", "steps", "item", "spills", "kernels")
KERNEL = r"ragged_decode_\w+?|decode_step\w*?|blockwise\w*?|column_mass|gated\w*?|vertical\w*?|phi\w*?"


def _by_kernel(folder: pathlib.Path, ending: str) -> dict[str, str]:
    """The texts of the dumps whose names end so, by kernel."""
    texts = {}
    for file in sorted(folder.glob(f"*{ending}")):
        if kernel := re.search(rf"({KERNEL})[.-]", file.name):
            texts[kernel.group(1)] = file.read_text()
    return texts


def bundles(folder: pathlib.Path) -> dict[str, int]:
    """Bundles of each kernel whose dump lies in a folder."""
    texts = _by_kernel(folder, "schedule-analysis_final_bundles.txt")
    counts = {x: re.search(r"total scheduled bundles:\s+(\d+)", text) for x, text in texts.items()}
    return {kernel: int(count[1]) for kernel, count in counts.items() if count}


_SPILLED = re.compile(r"v(?:st|ld) \[vmem:\[#allocation\d+_spill")


def spills(folder: pathlib.Path) -> dict[str, int]:
    """How often each kernel's text stores a vector register for lack of room, or loads one back."""
    texts = _by_kernel(folder, "-01-final_bundles.txt")
    return {kernel: len(_SPILLED.findall(text)) for kernel, text in texts.items()}


_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:?\s*(>*)[^{]*{")


def steps(folder: pathlib.Path) -> dict[str, list[int]]:
    """Bundles of the pieces that multiply matrices, in their order, of kernels that have several such.

    A piece is what runs from one label, or depth of loops, to the next: a loop's body, a branch.
    """
    texts = _by_kernel(folder, "-01-final_bundles.txt")
    pieces_of = {
        kernel: [count for _, count, products in _pieces(text, "vmatmul") if products]
        for kernel, text in texts.items()
    }
    return {kernel: pieces for kernel, pieces in pieces_of.items() if len(pieces) > 1}


def item(folder: pathlib.Path, kernel: str, pages: int) -> int:
    """Bundles of a kernel's item of so many pages, with what runs only at the ends of a list.

    Copies start in inner loops, of several pages a turn and, for those that are left over, of one; both stand
    twice, before the first item and in every one.
    """
    (file,) = (x for x in folder.glob("*-01-final_bundles.txt") if re.search(rf"\b{kernel}[.-]", x.name))
    pieces = _pieces(file.read_text(), r"dma\.(?:hbm_to_vmem|general)")
    straight = sum(count for depth, count, _ in pieces if len(depth) < 2)
    asking = [(starts, count) for depth, count, starts in pieces if len(depth) > 1 and starts]
    if not asking:
        return straight
    most, one = max(asking)[0], min(asking)[0]
    turn = next(count for starts, count in reversed(asking) if starts == most)
    return straight + pages // (most // one) * turn


def _pieces(text: str, what: str) -> list[tuple[str, int, int]]:
    """(depth of loops, bundles, how often something occurs in them) from one label or depth to the next."""
    pieces, depth = [("", 0, 0)], ""
    for line in text.splitlines():
        if bundle := _BUNDLE.match(line):
            if bundle.group(1) or bundle.group(2) != depth:
                depth = bundle.group(2)
                pieces.append((depth, 0, 0))
            _, bundles, occurrences = pieces[-1]
            pieces[-1] = depth, bundles + 1, occurrences + len(re.findall(what, line))
    return pieces


_ENTRY = re.compile(
    rf"entry function '({KERNEL})' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def registers(report: str) -> dict[str, dict[str, int]]:
    """Registers of a thread and bytes spilled of each kernel in the assembler's report."""
    return {
        kernel: {"registers": int(used), "spilled_bytes": int(stores) + int(loads)}
        for kernel, _, stores, loads, used in _ENTRY.findall(report)
    }


def _report_of(chip: str, name: str, folder: pathlib.Path, programs: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.kernels.operations import compiled_for
    from benchmarks.kernels.programs import digest
    from pallas_kernels.measure import aot

    case, place = compiled_for(chip)[name], aot.target(chip)
    impl = case.impl or place.impl
    program = aot.lowered(place, case.run(impl), *case.args, donated=case.donated)
    row: dict[str, Any] = {"impl": impl, "moves_bytes": case.moves, "flops": case.flops}
    row["roofline_us"] = round(roofline(chip, case.moves, case.flops) * 1e6, 2)
    row["program"] = digest(program)
    measured = programs.get(row["program"]) or _compiled(program, place.platform, folder, case)
    row |= {x: measured[x] for x in MEASURED if x in measured}
    if case.kernel in row.get("bundles", {}):
        # Of several steps, the one in which nothing is hidden.
        count = min(row.get("steps", {}).get(case.kernel, [row["bundles"][case.kernel]]))
        count = row.get("item", count)
        step = count / (CHIPS[chip].clock * 1e9)
        row["step_to_roofline"] = round(step / roofline(chip, *case.step), 2)
    programs[row["program"]] = row
    return row


def builds(chip: str) -> Iterator[tuple[str, str]]:
    """Each case of a chip with what the compiler at hand has against it, "" where it builds it."""
    from benchmarks.kernels.operations import compiled_for
    from pallas_kernels import compat, dispatch
    from pallas_kernels.measure import aot

    place = aot.target(chip)
    for name, case in compiled_for(chip).items():
        try:
            aot.compiled(place, case.run(case.impl or place.impl), *case.args, donated=case.donated)
        except (*compat.COMPILER_ERRORS, dispatch.Unsupported) as reason:
            yield name, f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
        else:
            yield name, ""


def _compiled(program: Any, platform: str, folder: pathlib.Path, case: Any) -> dict[str, Any]:
    """What compiling a program shows."""
    from benchmarks.kernels.programs import copies, launches

    report = folder / REPORT
    for file in folder.iterdir():
        if file != report:
            file.unlink()
    before, start = report.stat().st_size, time.perf_counter()
    binary = program.compile()
    row: dict[str, Any] = {"compile_s": round(time.perf_counter() - start, 1)}
    row["temp_bytes"] = binary.memory_analysis().temp_size_in_bytes
    row["copies"] = copies(binary, case.whole) if case.whole else []
    if platform == "tpu":
        row["bundles"], row["steps"] = bundles(folder), steps(folder)
        row["spills"] = spills(folder)
        if case.pages and case.kernel in row["bundles"]:
            row["item"] = item(folder, case.kernel, case.pages)
        if not row["bundles"]:
            raise RuntimeError("libtpu wrote no bundles: its flags for dumps are not what they were")
    elif platform == "gpu":
        row["launches"] = launches(binary)
        with report.open() as lines:
            lines.seek(before)
            # Mosaic GPU, whose assembler reports too, gives its kernels' names an ending.
            row["kernels"] = registers(lines.read().replace("_mosaic_gpu_kernel'", "'"))
    return row


def main() -> None:
    """``chip folder`` and, on standard input, names of cases and known programs: a line of output a case.

    A case that the compiler refuses is reported as an "error"; any other failure ends the process.
    """
    from pallas_kernels import compat, dispatch
    from pallas_kernels.measure import aot

    # A program is the same at every place and line of its source.
    aot.jax.config.update("jax_traceback_in_locations_limit", 0)
    chip, folder = sys.argv[1:]
    names, programs = json.loads(sys.stdin.readline())
    for name in names:
        try:
            row = _report_of(chip, name, pathlib.Path(folder), programs)
        except (*compat.COMPILER_ERRORS, dispatch.Unsupported) as reason:
            row = {"error": f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"}
        answer([name, row])


if __name__ == "__main__":
    main()
