"""What the second embedded model must show, each figure beside its aim, as one JSON file.

python -m train.aims --config configs/pretrain/embedded.yaml --write FILE.json       the newest checkpoint
python -m train.aims --config configs/pretrain/embedded.yaml --model DIR --write FILE.json

Text, words, names and ten of the twenty wordings are held out. Weights are rounded to bfloat16 as they are
stored, attention is full. Products are those of training (bfloat16 in, float32 out); ``--exact`` takes
float32 ones instead.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from kvjax.types import Params
from train import asked, confidence, heads, recall, retrieval
from train.evaluate import RULER, vocabulary_source
from train.pretrain import latest
from train.setup import Setup, options, read, round_to, setup

COUNT = 200
LENGTHS = (512, 1024, 2048)
SILENCED = (1024, 0.5)
"""Length of the rows asked for with silenced heads, and their number as a share of the others'."""
SEED = 3
AIMS: dict[str, tuple[str, float]] = {
    "sentence": (">=", 0.90),
    "trained": (">=", 0.97),
    "untrained": (">=", 0.85),
    "paraphrased": (">=", 0.70),
    "four_keys": (">=", 0.95),
    "ruler_single": (">=", 0.90),
    "ruler_multikey": (">=", 0.90),
    "ruler_multivalue": (">=", 0.70),
    "ruler_multiquery": (">=", 0.70),
    "vt": (">=", 0.85),
    "retrieving_heads": (">=", 6),
    "retrieving_layers": (">=", 3),
    "without_any_head": (">=", 0.90),
    "without_any_layers_retrieving_heads": (">=", 0.50),
    "least_kind": (">=", 0.125),
    "lowest_entropy": ("<=", 0.3),
    "highest_entropy": (">=", 0.8),
    "calibration_error": ("<=", 0.05),
    "sure": (">=", 0.30),
    "autocorrelation": (">=", 0.30),
    "bits_per_byte": ("<", 1.85),
}
"""Relation and bound; the lowest over lengths counts for recall, the mean over them for wordings."""


def evaluate(
    have: Setup, params: Params, *, count: int, lengths: tuple[int, ...], exact: bool
) -> dict[str, Any]:
    """Everything; progress on standard error.

    Args:
      have: config with its texts.
      params: of ``have.spec``, any dtype.
      count: rows a group and length.
      lengths: of rows.
      exact: float32 products.

    Returns:
      A JSON tree: recall, wordings (each alone), values, ruler, heads, silenced, confidence, bits_per_byte,
        and
      aims: name to {"is", "aim", "met"}.
    """
    weights, spec = round_to(params, "bfloat16"), have.spec
    score = recall.nll if exact else recall.quick_nll
    ask = functools.partial(recall.task_recall, spec, weights, score=score, seed=SEED)
    table: dict[str, Any] = {"n": count, "seed": SEED, "lengths": list(lengths), "exact": exact}
    table["recall"] = _by_length(
        lambda name, length: ask(
            asked.CHECKS[name], have.held, length=length, count=count, by_token=name == "sentence"
        ),
        asked.CHECKS,
        lengths,
    )

    def of_one(group: str, index: int) -> dict[str, float]:
        row, rows = asked.Facts(group, only=index), max(1, count // len(asked.GROUPS[group]))
        return {str(length): ask(row, have.held, length=length, count=rows) for length in lengths}

    table["wordings"] = {
        group: [
            {"hide": wording.hide, "kind": wording.kind, "recall": of_one(group, i)}
            for i, wording in enumerate(tqdm(wordings, desc=group))
        ]
        for group, wordings in asked.GROUPS.items()
    }
    table["values"] = _by_length(
        lambda name, length: ask(asked.VALUES[name], have.held, length=length, count=count),
        asked.VALUES,
        lengths,
    )
    plain = vocabulary_source(have)
    table["ruler"] = {
        name: {
            str(length): ask(
                question.row,
                have.held if question.books else plain,
                length=length,
                count=count,
                by_word=True,
            )
            for length in question.lengths
            if length in lengths
        }
        for name, question in tqdm(RULER.items(), desc="ruler")
        if name not in ("cwe", "fwe")
    }
    table["heads"] = retrieval.measure(spec, weights, have.held)
    kinds = heads.measure(spec, weights, have.held)["kinds"]
    table["heads"]["kinds"] = kinds
    length, rows = min(SILENCED[0], max(lengths)), max(5, int(count * SILENCED[1]) // 5 * 5)

    def needles(lame: Params) -> dict[str, float]:
        found = recall.needle_recall(
            spec, lame, have.held, length=length, keys=1, count=rows, seed=SEED, score=score
        )
        facts = recall.task_recall(
            spec, lame, asked.CHECKS["trained"], have.held, length=length, count=rows, seed=SEED, score=score
        )
        return {"needles": float(found.mean()), "wordings": facts}

    table["silenced"] = {"n": rows, "length": length} | retrieval.silence(
        spec, weights, table["heads"]["retrieving"], needles
    )
    table["confidence"] = confidence.measure(
        spec,
        weights,
        {"prose": have.books, "predictable": have.held},
        count=max(2, count // 12),
        length=1024,
        seed=SEED,
    )
    table["bits_per_byte"] = recall.bits_per_byte(
        spec, weights, have.books, windows=min(128, count), score=score
    )
    table["aims"] = judge(table)
    return table


def _by_length(
    measure: Callable[..., float], names: Any, lengths: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    return {name: {str(length): measure(name, length) for length in lengths} for name in tqdm(names)}


def judge(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each aim's figure, bound and whether it is met."""
    least = lambda cells: min(cells.values())  # noqa: E731
    mean = lambda cells: float(np.mean(list(cells.values())))  # noqa: E731
    recalls, ruler, found = table["recall"], table["ruler"], table["heads"]

    def of(part: str) -> list[float]:
        return [value for name, cells in ruler.items() if part in name for value in cells.values()]

    flat = [kind for layer in found["kinds"] for kind in layer]
    entropies = np.ravel(found["entropy"])
    lame = table["silenced"]
    figures = {name: least(recalls[name]) for name in ("sentence", "paraphrased", "four_keys")}
    figures |= {name: mean(recalls[name]) for name in ("trained", "untrained")}
    figures |= {f"ruler_{part}": min(of(part), default=float("nan")) for part in ("single", "multikey")}
    figures |= {f"ruler_{part}": min(of(part), default=float("nan")) for part in ("multivalue", "multiquery")}
    figures |= {
        "vt": min(of("vt"), default=float("nan")),
        "retrieving_heads": len(found["retrieving"]),
        "retrieving_layers": len({layer for layer, _ in found["retrieving"]}),
        "without_any_head": min(cell["needles"] for row in lame["heads"] for cell in row),
        "without_any_layers_retrieving_heads": min(
            (cell["needles"] for cell in lame["layers"].values()), default=float("nan")
        ),
        "least_kind": min(flat.count(kind) / len(flat) for kind in ("local", "sink", "sparse", "diffuse")),
        "lowest_entropy": float(entropies.min()),
        "highest_entropy": float(entropies.max()),
        "calibration_error": table["confidence"]["prose"]["calibration_error"],
        "sure": table["confidence"]["both"]["sure"],
        "autocorrelation": table["confidence"]["predictable"]["autocorrelation"]["1"],
        "bits_per_byte": table["bits_per_byte"],
    }
    tests = {">=": float.__ge__, "<=": float.__le__, "<": float.__lt__}
    return {
        name: {
            "is": figures[name],
            "aim": f"{sign} {bound:g}",
            "met": tests[sign](float(figures[name]), bound),
        }
        for name, (sign, bound) in AIMS.items()
    }


def rounded(tree: Any) -> Any:
    """Floats with four digits behind the point."""
    return jax.tree.map(lambda x: round(x, 4) if isinstance(x, float) else x, tree)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.aims", description=__doc__.splitlines()[0])
    options(parser)
    parser.add_argument("--model", type=Path, help="an exported folder; the newest checkpoint without it")
    parser.add_argument("--count", type=int, default=COUNT, help="rows a group and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of rows")
    parser.add_argument("--exact", action="store_true", help="float32 products")
    parser.add_argument("--write", type=Path, help="JSON file")
    args = parser.parse_args()
    config = read(args.config, args.set, args.folder)
    if args.model is None:
        have = setup(config)
        step, params = latest(have)
    else:
        from kvjax.models import hf

        step, params = None, hf.load(args.model, dtype="float32").params
        have = setup(config | {"tokenizer": str(args.model / "tokenizer.json")})
    table = evaluate(have, params, count=args.count, lengths=tuple(args.lengths), exact=args.exact)
    table = rounded({"config": config["name"], "step": step} | table)
    for name, row in table["aims"].items():
        print(f"{name:36} {row['is']:>8} {row['aim']:>8} {'met' if row['met'] else 'MISSED'}")
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
