"""The studies of KVP: ``python -m studies.kvp`` (``--help`` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from studies.kvp import commands

RESULTS = Path("results/kvp")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.kvp", description=(commands.__doc__ or "").split("\n")[0])
    parser.add_argument("study", choices=list(commands.DO))
    parser.add_argument("--config", type=Path, required=True, help="of configs/ranker")
    parser.add_argument(
        "--rankers", type=Path, nargs="+", default=[], metavar="FILE",
        help="of costs and time: trained rankers, first the one in the tables by head",
    )  # fmt: skip
    parser.add_argument(
        "--variants",
        type=cli.words,
        default=[],
        metavar="NAMES",
        help="of ablate (default: all of the config)",
    )
    parser.add_argument(
        "--lengths", type=cli.numbers(64), default=[1024, 2048, 8192, 16384, 32768],
        help="of time: tokens of a prompt (default: 1024,2048,8192,16384,32768)",
    )  # fmt: skip
    parser.add_argument(
        "--full-size", type=Path, nargs="*", default=[], metavar="CONFIG", help="of time: FLOPs of these too"
    )
    cli.add(parser, "--out", default=RESULTS, help=f"where files go (default: {RESULTS})")
    values = vars(parser.parse_args(words))
    if values["study"] != "ablate" and not values["rankers"]:
        raise cli.InputError(f"{values['study']} needs trained rankers. Give --rankers FILE.")
    commands.do(values["study"], values)


if __name__ == "__main__":
    cli.start(main)
