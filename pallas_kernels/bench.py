"""What the kernels cost.

python -m pallas_kernels.bench [--only gated] [--shape small_2k]  on this CPU, beside dense forms
python -m pallas_kernels.bench --static [v5e h200 ...]            compiled for chips that are not here
python -m pallas_kernels.bench --device [--minutes 8]             on the GPU or TPU at hand: agreement, times
python -m pallas_kernels.bench --device --tiny triton --out X     the same program on a CPU, interpreted
python -m pallas_kernels.bench --table                            the tables of README.md, from records
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from typing import Any

from pallas_kernels import dispatch
from pallas_kernels.measure import device, static, table, timing
from pallas_kernels.measure.work import beside, compiled_for, operations, work


def _here(only: str, shape: str) -> None:
    """Print a line for each operation, shape and dtype.

    Raises:
      ValueError: the operation has no such shape.
    """
    for op in [only] if only else operations():
        its = work(op)
        shapes = its.SHAPES.tagged("bench")
        if shape:
            known = shapes | its.SHAPES.tagged("large")
            if shape not in known:
                raise ValueError(f"bench --only {op} --shape {shape}: it has {', '.join(known)}.")
            shapes = {shape: known[shape]}
        for name, sizes in shapes.items():
            for dtype in its.DTYPES:
                line = its.bench(sizes, dtype)
                times = timing.in_turns(line.runs, line.repeats)
                print(timing.report(op, name, dtype, times, line.base, line.most), flush=True)


def _known(file: pathlib.Path, chip: str) -> dict[str, Any]:
    known = json.loads(file.read_text())["cases"] if file.is_file() else {}
    return {name: x for name, x in known.items() if name in compiled_for(chip)}


def _static(chips: list[str], only: str, again: bool) -> int:
    """Compile all cases, record each at once; how many a compiler refused."""
    from pallas_kernels.measure import aot

    refused = 0
    for chip in chips or list(static.CHIPS):
        file = dispatch.TUNED / chip / "static.json"
        found, names = _known(file, chip), [x for x in compiled_for(chip) if x.startswith(only)]
        known, alone = {} if again else dict(found), beside()
        # Mosaic GPU compiles a kernel once a process, and tells its registers once.
        groups = [[x for x in names if x not in alone], *([x] for x in names if x in alone)]
        results = (static.report(chip, group, known) for group in groups if group)
        for name, result in itertools.chain.from_iterable(results):
            found[name], refused = result, refused + ("error" in result)
            print(f"{chip:6} {name:44} {json.dumps(result)}", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            ordered = {x: found[x] for x in compiled_for(chip) if x in found}
            text = json.dumps({"wheels": aot.wheels(), "cases": ordered}, indent=1)
            file.write_text(text + "\n")
    return refused


def _device(args: argparse.Namespace) -> int:
    """Measure; how many operations disagree with their definition or were not checked."""
    folder = pathlib.Path(args.out) if args.out else None
    if args.tiny and folder is None:
        raise ValueError("bench --device --tiny says nothing of a device. Name a folder of its own: --out X.")
    only = (args.only,) if args.only else ()
    found = device.measure(args.minutes, folder=folder, tiny=args.tiny, only=only)
    for op, record in found.items():
        print(f"{op:14} agrees: {record['agrees']}  targets: {json.dumps(record['targets'])}", flush=True)
    return sum(not record["agrees"] for record in found.values())


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", nargs="*", metavar="CHIP", choices=list(static.CHIPS))
    parser.add_argument("--only", default="", help="an operation; with --static: cases whose name begins so")
    parser.add_argument(
        "--shape", default="", help="on this CPU, with --only: one of its shapes, large ones too"
    )
    parser.add_argument("--again", action="store_true", help="with --static: what was compiled already, too")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="with --device: over after this")
    parser.add_argument(
        "--tiny", choices=list(dispatch.MAIN), help="with --device: bodies to run interpreted"
    )
    parser.add_argument("--out", help="with --device: where to record instead of tuned/<device>")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.static is None and not args.table and args.only not in ("", *operations()):
        parser.error(f"--only {args.only}: no operation has that name. Use one of {', '.join(operations())}.")
    if args.shape and not args.only:
        parser.error(f"--shape {args.shape} is of one operation. Name it with --only.")
    return args


def main() -> int:
    """See the module's docstring; 1 when a compiler refused a case or an operation does not agree."""
    args, bad = _parsed(), 0
    if args.static is not None:
        bad = _static(args.static, args.only, args.again)
    elif args.device:
        bad = _device(args)
    elif not args.table:
        _here(args.only, args.shape)
        return 0
    if not args.tiny:
        table.write()
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
