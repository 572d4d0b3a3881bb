"""Files of learned weights: ``python -m kvjax.weights convert | random`` (``published``, ``gates``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.weights import gates, published


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    return cli.run(_make, argv)


def _make(words: Sequence[str]) -> None:
    options = _parser().parse_args(words)
    preset, part = "wg-kv", "write_gate"
    if options.verb == "convert":
        preset, part = published.convert(options.file, options.model, options.out, options.weight)
    else:
        gates.make_random(options.model, options.share, options.out)
    print(
        f"{options.out} written. Serve it with --policy {preset} --weights {part}={options.out}.",
        file=sys.stderr,
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m kvjax.weights", description="Files of learned weights.")
    verbs = parser.add_subparsers(dest="verb", metavar="convert | random", required=True)
    theirs = verbs.add_parser("convert", help="published weights to a safetensors file")
    theirs.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="WG-KV or Fast KVzip: .pt; KVzap: model.safetensors; LU-KV: .npy",
    )
    theirs.add_argument(
        "--lambda", dest="weight", metavar="X", help="of WG-KV, for the notes (default: as named)"
    )
    untrained = verbs.add_parser("random", help="untrained gates that admit a share of any text")
    share = cli.Rule(float, lambda x: x == x, "a number, 0 to 1")
    untrained.add_argument("--share", metavar="X", type=share, required=True, help="0 to 1")
    for verb in (theirs, untrained):
        cli.add(verb, "--model", required=True, help="folder or hub id of the model the gates are for")
        cli.add(verb, "--out", metavar="FILE.safetensors", required=True, help="written, or replaced")
    return parser


if __name__ == "__main__":
    cli.start(main)
