"""``python -m studies.topk_phi budgets``: what each budget retrieves; ``speed``: where a read's time goes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli, reads
from kvjax.bench import machine

RESULTS = Path("results/topk_phi")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.topk_phi", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", metavar="budgets | speed", required=True)
    table = verbs.add_parser(
        "budgets", help="tokens retrieved within a share of the prompt, with and without φ"
    )
    table.add_argument(
        "--length", nargs="+", type=cli.whole("--length", 1), default=[1024, 2048], metavar="N"
    )
    share = cli.number("--share", float, lambda x: 0 < x <= 1, "a share, above 0 to 1")
    table.add_argument("--share", nargs="+", type=share, default=[0.03, 0.04, 0.06, 0.08, 0.12], metavar="F")
    table.add_argument("--features", type=cli.whole("--features", 1), default=64, metavar="F")
    table.add_argument("--head-dim", type=cli.whole("--head-dim", 1), default=64, metavar="D")
    table.add_argument(
        "--generated",
        type=cli.whole("--generated", 1),
        default=1,
        metavar="L",
        help="steps that share reading φ",
    )
    timed = verbs.add_parser("speed", help="a layer's decode read on one CPU, part by part")
    timed.add_argument("--context", type=cli.whole("--context", 1), default=32768, metavar="N")
    timed.add_argument("--batch", nargs="+", type=cli.whole("--batch", 1), default=[1, 8], metavar="B")
    timed.add_argument("--rounds", type=cli.whole("--rounds", 1), default=15, metavar="R")
    cli.add(timed, "--dtype", default="float32")
    cli.add(timed, "--out", default=RESULTS)
    said = parser.parse_args(words)
    if said.verb == "budgets":
        _budgets(said.length, said.share, said.features, said.head_dim, said.generated)
        return
    _alone()
    from studies.topk_phi import speed

    rows = speed.measure(said.context, said.batch, said.dtype, said.rounds)
    said.out.mkdir(parents=True, exist_ok=True)
    about = {"cpu": machine.cpu_name(), "context": said.context, "dtype": said.dtype, "rounds": said.rounds}
    file = said.out / f"speed_{said.context}_{said.dtype}.json"
    file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(speed.table(rows))


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
            found = [
                reads.retrieved(share, length),
                reads.retrieved(share, length, **size),
                reads.retrieved(share, length, **size, wide=2.0),
            ]
            cells = " | ".join(map(reads.written, found))
            print(f"| {length} | {share:g} | {reads.budget(share, length)} | {cells} |")


if __name__ == "__main__":
    cli.start(main)
