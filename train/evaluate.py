"""What a trained model can do: recall by length and depth, every task it was trained for, bits per byte.

python -m train.evaluate --config configs/pretrain/small.yaml --model kvjax/assets/small --write FILE.json
python -m train.evaluate --config configs/pretrain/small.yaml            the newest checkpoint instead

Weights are rounded to bfloat16 as they are stored, attention is full, arithmetic float32. Text and key words
are held out. Rows marked "no books" in ``RULER`` draw their key words from the tokenizer's own
vocabulary and their haystack from fixed sentences: anybody gets the same figures without the texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from kvjax.types import Params
from train import heads, recall, rows, tasks
from train.pretrain import latest
from train.setup import Setup, round_to, setup
from train.tasks import niah, tracking, words
from train.tasks.pieces import NOISE, RowFn

COUNT = 200
"""Needles a cell behind a claim."""
SEED = 2
"""Of the rows; a training run's checks use others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One task as it is evaluated.

    Attributes:
      row: draws a row in the evaluation's form.
      books: whether its haystack is book text.
      lengths: tokens of a row at which it is asked.
    """

    row: RowFn
    books: bool
    lengths: tuple[int, ...] = (512, 1024, 2048)


def _niah(form: str) -> Question:
    books = niah.FORMS[form].hay == "book"
    return Question(row=functools.partial(niah.row, form=form, full=True), books=books)


def _again(name: str, *lengths: int) -> Question:
    return Question(row=tasks.TASKS[name], books=True, lengths=lengths)


RULER = {f"niah_{form}": _niah(form) for form in niah.FORMS} | {
    "vt": Question(
        row=functools.partial(tracking.row, hops=4, example=True), books=False, lengths=(1024, 2048)
    ),
    "cwe": Question(row=functools.partial(words.cwe, full=True), books=False, lengths=(1024, 2048)),
    "fwe": Question(row=words.fwe, books=False),
}
"""RULER's tasks but its two on Wikipedia questions, which the model was not trained for."""

OTHERS = {
    name: _again(name, 512, 1024)
    for name in ("stories", "labels", "rerank", "arithmetic", "dialogue", "pairs", "associations")
}


def evaluate(have: Setup, params: Params, *, count: int) -> dict[str, Any]:
    """The whole table; progress on standard error.

    Args:
      have: config with its texts.
      params: of ``have.spec``, any dtype.
      count: rows a cell of the needle tables; half as many in the others.

    Returns:
      A JSON tree: needles (by number of keys and length: mean, by depth), ruler and tasks (by name and
      length), ablation (``heads.ablate``), heads (``heads.measure``), bits_per_byte.
    """
    rounded, spec = round_to(params, "bfloat16"), have.spec
    plain = vocabulary_source(have)
    lengths = tuple(have.config["check"]["lengths"])
    table: dict[str, Any] = {"n": count, "n_tasks": count // 2, "seed": SEED, "depths": recall.DEPTHS}
    asked = [(keys, length) for keys in (1, 4) for length in lengths]
    table["needles"] = {}
    for keys, length in tqdm(asked, desc="needles"):
        found = recall.needle_recall(
            spec, rounded, have.held, length=length, keys=keys, count=count, seed=SEED
        )
        by_depth = [round(float(row.mean()), 3) for row in found]
        table["needles"][f"{keys} of {length}"] = {"mean": round(float(found.mean()), 4), "depth": by_depth}
    for group, questions in (("ruler", RULER), ("tasks", OTHERS)):
        table[group] = {}
        for name, question in tqdm(questions.items(), desc=group):
            source = have.held if question.books else plain
            table[group][name] = {"books": question.books} | {
                str(length): round(
                    recall.task_recall(
                        spec,
                        rounded,
                        question.row,
                        source,
                        length=length,
                        count=count // 2,
                        seed=SEED,
                        by_word=group == "ruler",
                    ),
                    4,
                )
                for length in question.lengths
            }
    table["bits_per_byte"] = round(recall.bits_per_byte(spec, rounded, have.books, windows=128), 4)
    table["heads"] = heads.measure(spec, rounded, have.held)

    def further(lame: Params) -> dict[str, float]:
        ask = functools.partial(recall.task_recall, spec, lame, count=count // 4, seed=3)
        return {
            "vt": round(ask(row=RULER["vt"].row, source=plain, length=1024, by_word=True), 4),
            "pairs": round(ask(row=OTHERS["pairs"].row, source=have.held, length=512), 4),
            "bits_per_byte": round(recall.bits_per_byte(spec, lame, have.books, windows=16), 3),
        }

    table["ablation"] = heads.ablate(spec, rounded, have.held, count=count // 4, further=further)
    return table


def vocabulary_source(have: Setup) -> rows.Source:
    """Held-out key words that the tokenizer itself holds as single tokens, in text that says nothing."""
    tokenizer = have.tokenizer
    found = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    mine = sorted(
        {word[1:] for word in found if word[:1] == " " and word[1:].islower() and word[1:].isalpha()}
    )
    long = [word for word in mine if 4 <= len(word) <= 9]
    text = np.asarray(tokenizer.encode(("\n" + NOISE) * 200).ids, np.int32)
    return rows.make_source(tokenizer, text, long, held_out=True)


def show(table: dict[str, Any]) -> None:
    """The table's numbers, a line each."""
    for name, cell in table["needles"].items():
        print(f"{name:24}  {100 * cell['mean']:5.1f} %   by depth {[100 * d for d in cell['depth']]}")
    for group in ("ruler", "tasks"):
        for name, cell in table[group].items():
            print(f"{name:24}", {k: v for k, v in cell.items() if k != "books"})
    print("bits per byte, held-out books:", table["bits_per_byte"])
    print("ablation:", json.dumps(table["ablation"]["groups"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="an exported folder; the newest checkpoint without it")
    parser.add_argument("--count", type=int, default=COUNT, help="rows a cell")
    parser.add_argument("--write", type=Path, help="JSON file for train.card")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text())
    if args.model is None:
        have = setup(config)
        step, params = latest(have)
        print(f"checkpoint of step {step}")
    else:
        from kvjax.models import hf

        params = hf.load(args.model, dtype="float32").params
        have = setup(config | {"tokenizer": str(args.model / "tokenizer.json")})
    table = evaluate(have, params, count=args.count)
    show(table)
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
