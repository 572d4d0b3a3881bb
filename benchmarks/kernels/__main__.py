"""What the kernels cost.

python -m benchmarks kernels [--only gated] [--shape small_2k]  on this CPU, beside dense forms
python -m benchmarks kernels --static [v5e h200 ...]            compiled for chips that are not here
python -m benchmarks kernels --builds [v5e h200 ...]            whether the jax at hand compiles them
python -m benchmarks kernels --device [--minutes 8]             on the GPU or TPU at hand: agreement, times
python -m benchmarks kernels --device --tiny triton --out X     the same program on a CPU, interpreted
python -m benchmarks kernels --table                            the tables of pallas_kernels/README.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from collections.abc import Sequence

from benchmarks.kernels import device, on_cpu, static, table
from benchmarks.kernels.operations import ALL, compiled_for, mosaic_gpu_cases
from pallas_kernels import dispatch


def _static(chips: list[str], only: str, again: bool) -> int:
    """Compile all cases and record each at once; returns how many a compiler refused."""
    from pallas_kernels.measure import aot

    refused = 0
    for chip in chips or list(static.CHIPS):
        file, cases = dispatch.TUNED / chip / "static.json", compiled_for(chip)
        recorded = json.loads(file.read_text())["cases"] if file.is_file() else {}
        recorded = {name: x for name, x in recorded.items() if name in cases}
        names, alone = [x for x in cases if x.startswith(only)], mosaic_gpu_cases()
        # Mosaic GPU compiles a kernel once a process, and reports its registers once.
        groups = [[x for x in names if x not in alone], *([x] for x in names if x in alone)]
        known = {} if again else dict(recorded)
        results = (static.report(chip, group, known) for group in groups if group)
        for name, result in itertools.chain.from_iterable(results):
            recorded[name], refused = result, refused + ("error" in result)
            print(f"{chip:6} {name:44} {json.dumps(result)}", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            ordered = {x: recorded[x] for x in cases if x in recorded}
            file.write_text(json.dumps({"wheels": aot.wheels(), "cases": ordered}, indent=1) + "\n")
    return refused


def _builds(chips: list[str]) -> None:
    """Whether the compilers beside this jax build the cases; recorded under its version."""
    from pallas_kernels.measure import aot

    for chip in chips or list(static.CHIPS):
        file = dispatch.TUNED / chip / "builds.json"
        recorded = json.loads(file.read_text()) if file.is_file() else {}
        cases = {}
        for name, why in static.builds(chip):
            cases[name] = why
            print(f"{chip:6} {name:44} {why or 'compiles'}", flush=True)
        recorded[aot.jax.__version__] = {"wheels": aot.wheels(), "cases": cases}
        file.write_text(json.dumps(recorded, indent=1) + "\n")


def _device(args: argparse.Namespace) -> int:
    """Measure; returns how many operations disagree with their definition or were not checked."""
    folder = pathlib.Path(args.out) if args.out else None
    if args.tiny and folder is None:
        raise ValueError("kernels --device --tiny measures no device. Name a folder of its own: --out X.")
    only = (args.only,) if args.only else ()
    records = device.measure(args.minutes, folder=folder, tiny=args.tiny, only=only)
    for op, record in records.items():
        print(f"{op:14} agrees: {record['agrees']}  targets: {json.dumps(record['targets'])}", flush=True)
    return sum(not record["agrees"] for record in records.values())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--static", nargs="*", metavar="CHIP", choices=list(static.CHIPS))
    parser.add_argument("--builds", nargs="*", metavar="CHIP", choices=list(static.CHIPS))
    parser.add_argument(
        "--only", default="", help="an operation; with --static: cases whose name begins with it"
    )
    parser.add_argument(
        "--shape", default="", help="on this CPU, with --only: one of its shapes, large or not"
    )
    parser.add_argument(
        "--again", action="store_true", help="with --static: compile also what has not changed"
    )
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="with --device: limit of the whole run")
    parser.add_argument(
        "--tiny", choices=list(dispatch.MAIN), help="with --device: bodies to run interpreted"
    )
    parser.add_argument("--out", help="with --device: where to record instead of tuned/<device>")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(argv)
    if args.static is None and args.builds is None and not args.table and args.only not in ("", *ALL):
        parser.error(f"--only {args.only}: no operation has that name. Use one of {', '.join(ALL)}.")
    if args.builds is not None and args.only:
        parser.error(f"--only {args.only}: --builds compiles every case. Leave --only out.")
    if args.shape and not args.only:
        parser.error(f"--shape {args.shape} belongs to one operation. Name it with --only.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring; 1 when a compiler refused a case or an operation does not agree."""
    args, bad = _parsed(argv), 0
    if args.static is not None:
        bad = _static(args.static, args.only, args.again)
    elif args.builds is not None:
        _builds(args.builds)
    elif args.device:
        bad = _device(args)
    elif not args.table:
        on_cpu.run(args.only, args.shape)
        return 0
    if not args.tiny:
        table.write()
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
