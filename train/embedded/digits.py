"""Does the constructed start copy numbers better in tokens of one digit or of up to three?

python -m train.embedded.digits --config configs/pretrain/embedded.yaml --folder DIR --write FILE.json

Only the two tokenizers are trained, in DIR. Rows of held-out text hide eight facts of one wording whose
values are numbers; measured is the weight of the six copying KV heads on the token that must be written next.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from train.embedded import retrieval
from train.embedded.checks import Value
from train.embedded.setup import initial_of, options, read, setup
from train.embedded.start_many import COPIES

CUTS = {"one": (1, 4096), "three": (3, 5120)}
"""Most digits of a token, and a vocabulary size that leaves about as many words."""


def measure(path: Path, sets: list[str], folder: Path, *, count: int, length: int) -> dict[str, Any]:
    """By tokenizer: tokens of the held-out books and of a value, weight on the token to copy."""
    cuts = {}
    for name, (digits, vocab) in CUTS.items():
        changes = [*sets, f"text.digits={digits}", f"model.vocab_size={vocab}"]
        prepared = setup(read(path, changes, folder / name))
        params, row, rng = initial_of(prepared.config), Value("number", 5, facts=8), np.random.default_rng(9)
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        while len(rows) < count:
            drawn = row(rng, prepared.held, length)
            if drawn is not None and (wanted := retrieval.copied_from(*drawn)).max() >= 0:
                rows.append((drawn[0], wanted))
        weight = retrieval.weight_on(prepared.spec, params, rows)
        each = {f"layer {i}, KV head {k}": float(weight[i, k]) for i in COPIES for k in range(len(COPIES[i]))}
        cuts[name] = {
            "vocabulary": vocab,
            "tokens_of_held_books": len(prepared.books.text),
            "tokens_of_a_value": float(np.mean([(wanted >= 0).sum() for _, wanted in rows])),
            "weight": {key: round(value, 4) for key, value in each.items()},
            "mean_weight": round(float(np.mean(list(each.values()))), 4),
        }
    return {"rows": count, "length": length, "cuts": cuts}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.digits", description=__doc__.splitlines()[0]
    )
    options(parser)
    parser.add_argument("--count", type=int, default=24, help="rows")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--write", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.folder is None:
        parser.error("--folder: two tokenizers are written; say where.")
    result = measure(args.config, args.set, args.folder, count=args.count, length=args.length)
    print(json.dumps(result, indent=1))
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
