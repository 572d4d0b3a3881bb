"""What the kernels cost.

python -m pallas_kernels.bench                                 on this CPU, every operation's own benchmark
python -m pallas_kernels.bench --static [v5e h200 ...]         compiled for chips that are not here
python -m pallas_kernels.bench --device [--minutes 8]          on the GPU or TPU at hand, with agreement
python -m pallas_kernels.bench --table                         the table of README.md from what was recorded
"""

from __future__ import annotations

import argparse
import importlib
import json
from importlib import metadata

from pallas_kernels import device, dispatch, static, table
from pallas_kernels.cases import cases, operations


def _static(chips: list[str], only: str) -> None:
    names = [name for name in cases() if name.startswith(only)]
    for chip in chips or list(static.CHIPS):
        file = dispatch.TUNED / chip / "static.json"
        known = json.loads(file.read_text())["cases"] if file.is_file() else {}
        for name, result in static.report(chip, names):
            known[name] = result
            print(f"{chip:6} {name:44} {json.dumps(result)}", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            wheels = {x: metadata.version(x) for x in ("jax", "libtpu", "jax-cuda12-plugin")}
            file.write_text(json.dumps({"wheels": wheels, "cases": known}, indent=1) + "\n")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", nargs="*", metavar="CHIP", choices=list(static.CHIPS))
    parser.add_argument("--only", default="", help="with --static: cases whose name begins so")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="with --device: start nothing after this")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.static is not None:
        _static(args.static, args.only)
        table.write()
    elif args.device:
        device.measure(args.minutes)
        table.write()
    elif args.table:
        table.write()
    else:
        for op in operations():
            importlib.import_module(f"pallas_kernels.{op}.bench").main()


if __name__ == "__main__":
    main()
