"""The studies of GVote: ``python -m studies.gvote`` (``--help`` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import cli
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of
from kvjax.eval.measure.protocol import PROTOCOLS
from kvjax.eval.tasks.data import find
from studies.gvote import commands

RESULTS = Path("results/gvote")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the studies; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    values = parse(words)
    commands.do(values, model_of(values), find())


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The options by name.

    Raises:
      InputError: an unknown word, or a number out of range.
    """
    parser = cli.Parser(prog="python -m studies.gvote", description=commands.__doc__.split("\n")[0])
    names = [*commands.DO, commands.SHARES]
    parser.add_argument(
        "--study", nargs="*", choices=names, default=list(commands.DO), help="default: all but shares"
    )
    parser.add_argument(
        "--task", type=cli.words, default=["ppl_books"], metavar="NAMES",
        help="whose texts (default: ppl_books); cost takes their tokens alone",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--lengths", type=cli.numbers(256), default=[1024], help="default: 1024")
    parser.add_argument("--samples", type=cli.whole(1), default=20, help="default: 20 texts")
    parser.add_argument(
        "--form", action="append", metavar="SPEC", help="of shares: a policy with {} for p (default: nine)"
    )
    parser.add_argument("--protocol", choices=PROTOCOLS, default="aware", help="of shares (default: aware)")
    parser.add_argument("--raw", action="store_true", help="of shares: ask a model that chats in bare words")
    cli.add(parser, "--out", default=RESULTS, help=f"where JSON and pictures go (default: {RESULTS})")
    return vars(parser.parse_args(words))


if __name__ == "__main__":
    cli.start(main)
