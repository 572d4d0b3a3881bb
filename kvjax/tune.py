"""Checks the Pallas kernels on the GPU or TPU at hand and switches on those that agree.

  python -m kvjax.tune                 under three minutes; kept in the user's cache folder
  python -m kvjax.tune --minutes 8     more time for blocks

Before that, and wherever a kernel fails or disagrees with its definition, attention runs on XLA. All results
are also written to one file, which can be sent to the project, so that the next release knows the device.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import cli

MINUTES = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code, 1 where a kernel stays off."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    from pallas_kernels import dispatch, records
    from pallas_kernels.measure.work import OPERATIONS

    parser = cli.Parser(prog="python -m kvjax.tune", description=(__doc__ or "").splitlines()[0])
    limit = cli.Rule(float, lambda x: 0 < x < math.inf, "a number above 0")
    parser.add_argument("--minutes", type=limit, default=MINUTES, help="limit of the whole run (default: 3)")
    parser.add_argument(
        "--only", nargs="+", choices=list(OPERATIONS), default=[], metavar="OPERATION", help="only these"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the records (default: the user's cache folder)"
    )
    parser.add_argument(
        "--tiny", choices=list(dispatch.MAIN), help="bodies to run interpreted on a CPU, to see it work"
    )
    options = parser.parse_args(argv)
    if options.tiny and not options.out:
        raise cli.InputError("--tiny says nothing about a device. Name a folder of its own with --out.")
    home = options.out or records.own()
    if home is None:
        raise cli.InputError(
            "tune has no folder for its records: KVJAX_CACHE is off, or there is no home folder. Set "
            "KVJAX_CACHE=DIR."
        )
    by_operation = measured(home, options.minutes, options.tiny, tuple(options.only))
    if not by_operation:
        raise cli.InputError("tune measured nothing. Leave --only out, or name operations of --help.")
    file = bundle(home, by_operation)
    for operation, record in by_operation.items():
        print(f"{operation:15} {state(record)}")
    print(f"All results in one file: {file}")
    return int(any(not record["agrees"] for record in by_operation.values()))


def measured(home: Path, minutes: float, tiny: str | None, only: tuple[str, ...]) -> dict[str, Any]:
    """The records, by operation, with a progress bar.

    Raises:
      InputError: no GPU or TPU here, one that cannot be used, or a folder that cannot be written.
    """
    from tqdm import tqdm

    from pallas_kernels.measure import device

    with tqdm(unit="part", disable=not sys.stderr.isatty()) as bar:

        def begun(task: dict[str, Any], count: int) -> None:
            bar.total = count
            doing = {"numerics": "checking", "blocks": "choosing blocks of"}[task["what"]]
            bar.set_description(f"{doing} {task['op']}")
            bar.update()

        try:
            return device.measure(minutes, home=home, tiny=tiny, only=only, begun=begun)
        except device.NoDeviceError as error:
            raise cli.InputError(
                "tune needs a GPU or TPU, and JAX finds none. On a CPU attention runs on XLA anyway; for a "
                "device install JAX as its own page says."
            ) from error
        except (RuntimeError, OSError) as error:
            raise cli.InputError(f"tune: {error}") from error


def bundle(home: Path, by_operation: dict[str, Any]) -> Path:
    """Writes all records of a device to one file beside their folder."""
    import kvjax
    from pallas_kernels import records

    device = next(iter(by_operation.values()))["device"]
    about = {"device": device, "kvjax": kvjax.__version__, "python": platform.python_version()}
    file = home / f"{records.slug(device)}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(about | {"operations": by_operation}, indent=1) + "\n", encoding="utf-8")
    part.replace(file)
    return file


def state(record: dict[str, Any]) -> str:
    """Whether a kernel is on, and if not, why."""
    if record["agrees"]:
        chosen = [x["chosen"] for x in record["blocks"].values() if x.get("chosen")]
        blocks = f"{len(chosen)} of {len(record['blocks'])} passes with other blocks than its own"
        made = sum("agrees" in x for x in record["checks"].values())
        return f"on: {record['impl']} agrees in {made} checks; {blocks}"
    wrong = [
        f"{name} ({x.get('why', 'disagrees')})"
        for name, x in record["checks"].items()
        if not x.get("agrees", True)
    ]
    lost = [x["lost"] for x in record["problems"].values() if "lost" in x]
    if not wrong and lost == ["the time was over"] * len(lost):
        return "off: no time was left to check it. Run again with more --minutes."
    return f"off: {'; '.join([*wrong[:3], *lost])}"


if __name__ == "__main__":
    cli.start(main)
