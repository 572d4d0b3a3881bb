"""The studies of CONF-KV: ``python -m studies.conf_kv`` (``--help`` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax import cli
from kvjax.eval.arguments import add_model
from kvjax.eval.commands import model_of
from kvjax.eval.tasks.data import find
from studies.conf_kv import commands

RESULTS = Path("results/conf_kv")


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
    parser = cli.Parser(
        prog="python -m studies.conf_kv",
        description="What CONF-KV's confidence buys: premise, rankings, sweeps.",
    )
    names = list(commands.DO)
    parser.add_argument(
        "--study", nargs="*", choices=names, default=names,
        help="default: all; with no word after it, pictures of what is there",
    )  # fmt: skip
    parser.add_argument(
        "--task", type=cli.words, default=["ppl_wikitext", "ppl_books"], metavar="NAMES",
        help="whose texts (default: ppl_wikitext,ppl_books; search takes WikiText-2's valid split)",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--lengths", type=cli.numbers(256), default=[512], help="default: 512")
    parser.add_argument("--samples", type=cli.whole(2), default=50, help="default: 50 windows")
    parser.add_argument("--threshold", type=float, default=0.7, help="c* (default: 0.7)")
    cli.add(parser, "--out", default=RESULTS, help=f"where JSON and pictures go (default: {RESULTS})")
    return vars(parser.parse_args(words))


if __name__ == "__main__":
    cli.start(main)
