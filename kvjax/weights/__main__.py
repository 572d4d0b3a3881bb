"""Files of learned weights: ``python -m kvjax.weights convert | random`` (``kvjax.weights.gates``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax.weights import WeightsError, gates


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 done, 2 bad input with one sentence on standard error."""
    from kvjax.models.hf_config import ModelError
    from kvjax.weights.torch_file import TorchFileError

    said = _parser().parse_args(argv)
    try:
        if said.verb == "convert":
            gates.convert(said.file, said.model, said.out, said.weight)
        else:
            gates.make_random(said.model, said.share, said.out)
    except (TorchFileError, WeightsError, ModelError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{said.out} written. Serve it with --policy wg-kv --gates {said.out}.", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvjax.weights", description="Files of WG-KV gates.")
    verbs = parser.add_subparsers(dest="verb", metavar="convert | random", required=True)
    published = verbs.add_parser("convert", help="a published .pt to a safetensors file")
    published.add_argument("file", metavar="FILE.pt", type=Path)
    published.add_argument("--lambda", dest="weight", metavar="X", help="for the notes (default: as named)")
    untrained = verbs.add_parser("random", help="untrained gates that admit a share of any text")
    untrained.add_argument("--share", metavar="X", type=float, required=True, help="0 to 1")
    for verb in (published, untrained):
        verb.add_argument("--model", metavar="DIR|HUB_ID", required=True, help="the model the gates are for")
        verb.add_argument("--out", metavar="FILE.safetensors", required=True, type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
