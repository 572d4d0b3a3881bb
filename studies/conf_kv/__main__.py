"""``python -m studies.conf_kv``: reads the command line and turns every outcome into an exit code.

0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.decode import RequestError
from kvjax.eval import arguments
from kvjax.eval.commands import model_of
from kvjax.eval.errors import EvalError
from kvjax.eval.tasks.data import find
from kvjax.models.hf_config import ModelError
from studies.conf_kv import commands

RESULTS = Path("results/conf_kv")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the studies; the exit code.

    Args:
      argv: the words after ``python -m studies.conf_kv``; None reads them from the process.
    """
    try:
        values = parse(sys.argv[1:] if argv is None else argv)
        commands.do(values, model_of(values), find())
    except (EvalError, ModelError, RequestError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The options by name.

    Raises:
      EvalError: an unknown word, or a number out of range.
    """
    parser = arguments._Parser(
        prog="python -m studies.conf_kv",
        description="What CONF-KV's confidence buys: premise, rankings, sweeps.",
    )
    names = list(commands.DO)
    parser.add_argument(
        "--study", nargs="*", choices=names, default=names,
        help="default: all; with no word after it, pictures of what is there",
    )  # fmt: skip
    parser.add_argument(
        "--task", type=arguments._words, default=["ppl_wikitext", "ppl_books"], metavar="NAMES",
        help="whose texts (default: ppl_wikitext,ppl_books; search takes WikiText-2's valid split)",
    )  # fmt: skip
    arguments._model(parser)
    parser.add_argument(
        "--lengths", type=arguments._numbers("--lengths", 256), default=[512], help="default: 512"
    )
    parser.add_argument(
        "--samples", type=arguments._whole("--samples", 2), default=50, help="windows (default: 50)"
    )
    parser.add_argument("--threshold", type=float, default=0.7, help="c* (default: 0.7)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR",
        help=f"where JSON and pictures go (default: {RESULTS})",
    )  # fmt: skip
    return vars(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
