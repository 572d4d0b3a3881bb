"""What the embedded model must show, each figure beside its aim, as one JSON file.

python -m train.embedded.aims --config configs/pretrain/embedded.yaml --write FILE.json   newest checkpoint
python -m train.embedded.aims --config configs/pretrain/embedded.yaml --model DIR --write FILE.json
python -m train.embedded.aims ... --parts tasks silenced --count 100 --write FILE.json    keeps FILE's rest

Text, words, names and ten of the twenty wordings are held out. Weights are rounded to bfloat16 as they are
stored, attention is full. Products are those of training (bfloat16 in, float32 out); ``--exact`` takes
float32 ones instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from kvjax.types import Params
from train.embedded import checks, confidence, heads, recall, retrieval
from train.embedded.pretrain import latest
from train.embedded.questions import OTHERS, RULER, Question, vocabulary_source
from train.embedded.setup import Setup, options, read, round_to, setup
from train.embedded.tasks.pieces import RowFn
from train.needles import Score, needle_recall

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exam:
    """A model and the size of the rows that it is measured on.

    Attributes:
      have: config with its texts.
      weights: of ``have.spec``, rounded as they are stored.
      count: rows a group and length.
      lengths: of rows.
      likelihood: ``recall.nll`` or ``recall.quick_nll``.
    """

    have: Setup
    weights: Params
    count: int
    lengths: tuple[int, ...]
    likelihood: Callable[..., tuple[jax.Array, jax.Array]]

    def score(self, weights: Params | None = None) -> Score:
        """Of the model, or of other weights in its place."""
        weights = self.weights if weights is None else weights
        return functools.partial(self.likelihood, self.have.spec, weights)

    def ask(self, row: RowFn, length: int, **how: Any) -> float:
        """``recall.task_recall``, by default on ``count`` rows of held-out text."""
        options: dict[str, Any] = {"source": self.have.held, "count": self.count, "seed": SEED} | how
        return recall.task_recall(self.score(), row, length=length, **options)

    def by_length(self, names: Iterable[str], measure: Callable[[str, int], float]) -> dict[str, Any]:
        return {name: {str(n): measure(name, n) for n in self.lengths} for name in tqdm(names)}

    def questions(self, questions: dict[str, Question], by_word: bool) -> dict[str, Any]:
        plain = vocabulary_source(self.have)

        def one(question: Question, length: int) -> float:
            source = self.have.held if question.books else plain
            return self.ask(question.row, length, source=source, by_word=by_word)

        return {
            name: {str(n): one(question, n) for n in question.lengths if n in self.lengths}
            for name, question in tqdm(questions.items(), desc="tasks")
        }


def _recall(exam: Exam) -> dict[str, Any]:
    return exam.by_length(
        checks.CHECKS, lambda name, n: exam.ask(checks.CHECKS[name], n, by_token=name == "sentence")
    )


def _wordings(exam: Exam) -> dict[str, Any]:
    """Each alone; all of a group share its rows."""

    def of_one(group: str, index: int) -> dict[str, float]:
        row, rows = checks.Facts(group, only=index), max(1, exam.count // len(checks.GROUPS[group]))
        return {str(length): exam.ask(row, length, count=rows) for length in exam.lengths}

    return {
        group: [
            {"hide": wording.hide, "kind": wording.kind, "recall": of_one(group, i)}
            for i, wording in enumerate(tqdm(wordings, desc=group))
        ]
        for group, wordings in checks.GROUPS.items()
    }


def _values(exam: Exam) -> dict[str, Any]:
    return exam.by_length(checks.VALUES, lambda name, n: exam.ask(checks.VALUES[name], n))


def _ruler(exam: Exam) -> dict[str, Any]:
    return exam.questions(RULER, by_word=True)


def _tasks(exam: Exam) -> dict[str, Any]:
    return exam.questions(OTHERS, by_word=False)


def _heads(exam: Exam) -> dict[str, Any]:
    measured = retrieval.measure(exam.have.spec, exam.weights, exam.have.held)
    return measured | {"kinds": heads.measure(exam.have.spec, exam.weights, exam.have.held)["kinds"]}


def _silenced(exam: Exam) -> dict[str, Any]:
    """Recall without each KV head, and without the retrieving heads of each layer."""
    spec, held = exam.have.spec, exam.have.held
    length, rows = min(SILENCED[0], max(exam.lengths)), max(5, int(exam.count * SILENCED[1]) // 5 * 5)

    def needles(weights: Params) -> dict[str, float]:
        score = exam.score(weights)
        size: dict[str, Any] = {"length": length, "count": rows, "seed": SEED}
        hits = needle_recall(score, held, keys=1, **size)
        return {
            "needles": float(hits.mean()),
            "wordings": recall.task_recall(score, checks.CHECKS["trained"], held, **size),
        }

    retrieving = retrieval.measure(spec, exam.weights, held)["retrieving"]
    return {"n": rows, "length": length} | retrieval.silence(spec, exam.weights, retrieving, needles)


def _confidence(exam: Exam) -> dict[str, Any]:
    have = exam.have
    texts = {"prose": have.books, "predictable": have.held}
    rows = max(2, exam.count // 12)
    return confidence.measure(have.spec, exam.weights, texts, count=rows, length=1024, seed=SEED)


def _bits(exam: Exam) -> float:
    have = exam.have
    windows = min(128, exam.count)
    return recall.bits_per_byte(exam.score(), have.books, windows=windows)


PARTS: dict[str, Callable[[Exam], Any]] = {
    "recall": _recall,
    "wordings": _wordings,
    "values": _values,
    "ruler": _ruler,
    "tasks": _tasks,
    "heads": _heads,
    "silenced": _silenced,
    "confidence": _confidence,
    "bits_per_byte": _bits,
}
"""What is measured, by its name in the file."""


def evaluate(
    have: Setup,
    params: Params,
    *,
    count: int,
    lengths: tuple[int, ...],
    exact: bool,
    parts: Sequence[str] = tuple(PARTS),
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything; progress on standard error.

    Args:
      have: config with its texts.
      params: of ``have.spec``, any dtype.
      count: rows a group and length.
      lengths: of rows.
      exact: float32 products.
      parts: what is measured.
      before: an earlier table, whose other parts stay.

    Returns:
      A JSON tree: ``PARTS``, n (of each part), and aims: name to {"is", "aim", "met"}.
    """
    likelihood = recall.nll if exact else recall.quick_nll
    weights = round_to(params, "bfloat16")
    exam = Exam(have=have, weights=weights, count=count, lengths=lengths, likelihood=likelihood)
    table = (before or {}) | {"seed": SEED, "lengths": list(lengths), "exact": exact}
    table["n"] = (before or {}).get("n", {}) | dict.fromkeys(parts, count)
    table |= {name: PARTS[name](exam) for name in parts}
    return table | {"aims": judge(table)}


def judge(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each aim's figure, bound and whether it is met."""
    least = lambda cells: min(cells.values())  # noqa: E731
    mean = lambda cells: float(np.mean(list(cells.values())))  # noqa: E731
    recalls, ruler, heads = table["recall"], table["ruler"], table["heads"]

    def of(part: str) -> list[float]:
        return [value for name, cells in ruler.items() if part in name for value in cells.values()]

    flat = [kind for layer in heads["kinds"] for kind in layer]
    entropies = np.ravel(heads["entropy"])
    silenced = table["silenced"]
    figures = {name: least(recalls[name]) for name in ("sentence", "paraphrased", "four_keys")}
    figures |= {name: mean(recalls[name]) for name in ("trained", "untrained")}
    figures |= {f"ruler_{part}": min(of(part), default=float("nan")) for part in ("single", "multikey")}
    figures |= {f"ruler_{part}": min(of(part), default=float("nan")) for part in ("multivalue", "multiquery")}
    figures |= {
        "vt": min(of("vt"), default=float("nan")),
        "retrieving_heads": len(heads["retrieving"]),
        "retrieving_layers": len({layer for layer, _ in heads["retrieving"]}),
        "without_any_head": min(cell["needles"] for row in silenced["heads"] for cell in row),
        "without_any_layers_retrieving_heads": min(
            (cell["needles"] for cell in silenced["layers"].values()), default=float("nan")
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
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.aims", description=__doc__.splitlines()[0]
    )
    options(parser)
    parser.add_argument("--model", type=Path, help="an exported folder; the newest checkpoint without it")
    parser.add_argument("--count", type=int, default=COUNT, help="rows a group and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of rows")
    parser.add_argument("--exact", action="store_true", help="float32 products")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
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
    before = None
    if len(args.parts) < len(PARTS):
        if args.write is None or not args.write.is_file():
            parser.error("--parts measures some of a table anew. Name one with --write, or measure all.")
        before = json.loads(args.write.read_text())
    table = evaluate(
        have,
        params,
        count=args.count,
        lengths=tuple(args.lengths),
        exact=args.exact,
        parts=args.parts,
        before=before,
    )
    table = rounded(table | {"config": config["name"], "step": step})
    for name, row in table["aims"].items():
        print(f"{name:36} {row['is']:>8} {row['aim']:>8} {'met' if row['met'] else 'MISSED'}")
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
