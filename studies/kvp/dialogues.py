"""Schema-Guided dialogues as documents, for traces of a ranker that is tested on such dialogues.

python -m studies.kvp.dialogues --out runs/ranker/sgd/documents
python -m train.traces --config configs/ranker/sgd.yaml

Other dialogues than those of ``dialogue_ppl`` (the data pack's training split), joined and written as there
until a document is long enough. A study: the data's licence (CC BY-SA 4.0) bars shipping the ranker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvjax import cli
from kvjax.eval.tasks.data import Data, find
from kvjax.eval.tasks.dialogue import ROLES

TRAIN = "dialogue/sgd_train.jsonl.gz"
WORDS = 900
"""Words of a document: more than 1,024 tokens."""


def documents(data: Data, count: int, words: int = WORDS, seed: int = 0) -> Iterator[str]:
    """``count`` texts of whole dialogues in random order, no dialogue twice; fewer where the data ends."""
    dialogues = list(data.lines(TRAIN))
    order = iter(np.random.default_rng(seed).permutation(len(dialogues)).tolist())
    for _ in range(count):
        lines: list[str] = []
        while sum(len(line.split()) for line in lines) < words:
            at = next(order, None)
            if at is None:
                return
            lines += [f"{ROLES[who]}: {text}" for who, text in dialogues[at]]
        yield "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the documents; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.kvp.dialogues", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=cli.whole(1), default=1200, help="default: 1200 documents")
    cli.add(parser, "--out", default=Path("runs/ranker/sgd/documents"), help="a folder")
    values = vars(parser.parse_args(words))
    values["out"].mkdir(parents=True, exist_ok=True)
    file, count = values["out"] / "documents.jsonl", 0
    with file.open("w", encoding="utf-8") as stream:
        for text in documents(find(), values["count"]):
            stream.write(json.dumps({"text": text}) + "\n")
            count += 1
    print(f"{file} holds {count} documents")


if __name__ == "__main__":
    cli.start(main)
