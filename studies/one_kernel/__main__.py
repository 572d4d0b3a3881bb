"""``python -m studies.one_kernel --chip v5e h200``: what a decode step starts, now and as one kernel.

JAX_PLATFORMS=cpu, in an environment with the wheels of the group ``aot``. A line for each chip, φ, number of
rows and form.
"""

from __future__ import annotations

import argparse

from studies.one_kernel import costs
from studies.one_kernel.arrays import Sizes

HEADS = {"K": 8, "G": 4, "H": 128}
"""Llama-3.1-8B's."""


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m studies.one_kernel", description=__doc__)
    parser.add_argument("--chip", nargs="+", choices=costs.CHIPS, default=["v5e", "v6e", "h200"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8], help="of the batch")
    parser.add_argument("--slots", type=int, default=8192, help="of a stream's pages")
    parser.add_argument("--window", type=int, default=256, help="slots of a ring")
    parser.add_argument("--features", nargs="+", type=int, default=[0, 128], help="of φ; 0: no φ")
    args = parser.parse_args()
    for chip in args.chip:
        for features in args.features:
            for rows in args.rows:
                sizes = Sizes(**HEADS, B=rows, W=args.window, S=64, M=args.slots // 64, F=features)
                for form, run in costs.forms(chip).items():
                    found = costs.costs(chip, run, sizes)
                    print(f"{chip} rows {rows} features {features} {form}: {found}", flush=True)


if __name__ == "__main__":
    main()
