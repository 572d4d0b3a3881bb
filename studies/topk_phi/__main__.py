"""The studies of Top-K and φ: ``python -m studies.topk_phi`` and one of these.

budgets   tokens retrieved within a share of the prompt
speed     where a read's time goes
heads     errors of attention's output with and without φ, by head (of traces: ``train.traces``)
even      how many reads φ must spare to pay, measured and on paper
report    report.md and pictures of what the last two wrote
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import machine
from kvjax import cli, reads
from kvjax.eval.measure.row import short

RESULTS = Path("results/topk_phi")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.topk_phi", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(
        dest="verb", metavar="budgets | speed | heads | even | report", required=True
    )
    table = verbs.add_parser(
        "budgets", help="tokens retrieved within a share of the prompt, with and without φ"
    )
    table.add_argument("--length", nargs="+", type=cli.whole(1), default=[1024, 2048], metavar="N")
    share = cli.Rule(float, lambda x: 0 < x <= 1, "a share, above 0 to 1")
    table.add_argument("--share", nargs="+", type=share, default=[0.03, 0.04, 0.06, 0.08, 0.12], metavar="F")
    table.add_argument("--features", type=cli.whole(1), default=64, metavar="F")
    table.add_argument("--head-dim", type=cli.whole(1), default=64, metavar="D")
    table.add_argument(
        "--generated",
        type=cli.whole(1),
        default=1,
        metavar="L",
        help="steps that share reading φ",
    )
    timed = verbs.add_parser("speed", help="a layer's decode read on one CPU, part by part")
    timed.add_argument("--context", type=cli.whole(1), default=32768, metavar="N")
    timed.add_argument("--batch", nargs="+", type=cli.whole(1), default=[1, 8], metavar="B")
    timed.add_argument("--rounds", type=cli.whole(1), default=15, metavar="R")
    cli.add(timed, "--dtype", default="float32")
    looked = verbs.add_parser("heads", help="errors of attention's output by head, with and without φ")
    looked.add_argument("--config", type=Path, required=True, help="of the maps and their traces")
    looked.add_argument("--prompt", type=cli.whole(1), metavar="N", help="of the config's")
    looked.add_argument("--maps", type=Path, required=True, metavar="FILE", help="as train.phi exports them")
    paid = verbs.add_parser("even", help="how many reads φ must spare to pay")
    paid.add_argument("--rounds", type=cli.whole(1), default=15, metavar="R")
    shown = verbs.add_parser("report", help="report.md and pictures")
    for verb in (timed, looked, paid, shown):
        cli.add(verb, "--out", default=RESULTS)
    options = parser.parse_args(words)
    if options.verb == "budgets":
        _budgets(options.length, options.share, options.features, options.head_dim, options.generated)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.verb == "report":
        from studies.topk_phi import report

        print(*report.write(options.out), sep="\n")
    elif options.verb == "heads":
        _heads(options.config, options.prompt, options.maps, options.out)
    else:
        _alone()
        (_speed if options.verb == "speed" else _even)(options)


def _speed(options: argparse.Namespace) -> None:
    from studies.topk_phi import speed

    rows = speed.measure(options.context, options.batch, options.dtype, options.rounds)
    about = {
        "cpu": machine.cpu_name(),
        "context": options.context,
        "dtype": options.dtype,
        "rounds": options.rounds,
    }
    _put(options.out / f"speed_{options.context}_{options.dtype}.json", about | {"rows": rows})
    print(speed.table(rows))


def _even(options: argparse.Namespace) -> None:
    from studies.topk_phi import even

    rows, network = even.paper_rows(), kvjax.load("kvjax/assets/embedded").network
    cpu = even.measured(network, options.rounds)
    about = {"cpu": machine.cpu_name(), "rounds": options.rounds, "read": list(even.READ)}
    _put(options.out / "even.json", about | {"measured": cpu, "paper": rows})
    print(even.table(rows, cpu))


def _heads(config: Path, prompt: int | None, maps: Path, out: Path) -> None:
    from kvjax.models.hf import ModelError
    from studies.topk_phi import heads
    from train.config import ConfigError
    from train.phi.settings import read

    try:
        settings = read(config, prompt)
        result = heads.measure(settings, settings.base.model(), maps)
    except (ConfigError, ModelError) as reason:
        raise cli.InputError(str(reason)) from reason
    name = f"{settings.base.name}_{settings.prompt}"
    print(_put(out / f"heads_{name}.json", {"name": name} | short(result), None))


def _put(file: Path, tree: dict[str, Any], indent: int | None = 1) -> Path:
    file.write_text(json.dumps(tree, indent=indent) + "\n", encoding="utf-8")
    return file


def _alone() -> None:
    """One thread on one CPU, whatever else runs: the process starts anew where it did not begin so."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], machine.environment(1))
    machine.pin(machine.cpus(1))


def _budgets(
    lengths: Sequence[int], shares: Sequence[float], features: int, head_dim: int, generated: int
) -> None:
    print("| tokens | share | read a step | topk retrieves | beside phi | φ's float32 beside 16 bits |")
    print("|---|---|---|---|---|---|")
    for length in lengths:
        for share in shares:
            size = {"features": features, "head_dim": head_dim, "generated": generated}
            counts = [
                reads.retrieved(share, length),
                reads.retrieved(share, length, **size),
                reads.retrieved(share, length, **size, wide=2.0),
            ]
            cells = " | ".join(map(reads.written, counts))
            print(f"| {length} | {share:g} | {reads.budget(share, length)} | {cells} |")


if __name__ == "__main__":
    cli.start(main)
