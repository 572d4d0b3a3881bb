"""Finished cells in the layout of kvpress's results (its evaluation/evaluate.py), so that rows compare.

A folder DATASET__DIR__MODEL__PRESS__RATIO, with __fraction0.100 and __compressed_questions behind it where
they apply:

  metrics.json     scores by task, in percent
  predictions.csv  a line a row of the data set, without its context
  config.yaml      what was run
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.algebra import Policy
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.suites.suite import Row as Source
from kvjax.eval.suites.suite import Suite

PRESSES = {
    "compactor": "compactor",
    "cur": "cur",
    "expected_attention": "expected_attention",
    "h2o": "observed_attention",
    "keydiff": "keydiff",
    "knorm": "knorm",
    "kvzip": "kvzip",
    "lagkv": "lagkv",
    "qfilter": "qfilter",
    "random": "random",
    "snapkv": "snapkv",
    "tova": "tova",
}
"""kvpress's name of an eviction, where a share of the prompt stays."""


def press(policy: Policy) -> str:
    """kvpress's name of a policy, or the policy's own words where it has none."""
    if policy == Policy():
        return "no_press"
    words = repr(policy).split(" + ")
    parts = [re.match(r"\w+", word)[0] for word in words]  # type: ignore[index]
    if parts[-1:] == ["uniform"] and len(parts) == 2 and parts[0] in PRESSES:
        return PRESSES[parts[0]]
    if parts == ["snapkv", "pyramid"]:
        return "pyramidkv"
    if len(parts) == 2 and parts[-1] == "ada" and parts[0] in PRESSES:
        return f"adakv_{PRESSES[parts[0]]}"
    return re.sub(r"[^\w.()=,+-]+", "", repr(policy))


def ratio(policy: Policy, rows: Sequence[Row]) -> float:
    """The share of a prompt that is removed: as the budget says it, else as measured, mean over samples."""
    if policy == Policy():
        return 0.0
    amount = getattr(policy.budget, "amount", None)
    if policy.budget.limited and isinstance(amount, float):
        return 1 - amount
    kept = [value for row in rows for value in row.each.kept]
    return 1 - sum(kept) / len(kept)


def write(
    to: Path, suite: Suite, source: Sequence[Source], rows: Sequence[Row], *, total: int, device: str
) -> list[Path]:
    """A folder for each policy that all rows of a run were measured under.

    Args:
      to: where the folders go.
      suite, source: the data set's rows.
      rows: finished cells of one protocol.
      total: samples of the run, under one policy.
      device: as JAX calls it.

    Returns:
      The folders.
    """
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row.cell.policy, []).append(row)
    written = []
    for words, own in by_policy.items():
        if sum(row.cell.samples for row in own) == total:
            written.append(_write_one(to, suite, source, parse_policy(words), own, device))
    return written


def _write_one(
    to: Path, suite: Suite, source: Sequence[Source], policy: Policy, rows: Sequence[Row], device: str
) -> Path:
    aware = any(row.cell.protocol == "aware" for row in rows)
    config = _config(suite, policy, rows, total=len(source), aware=aware, device=device)
    name = [config["dataset"], config["data_dir"] or "", config["model"].replace("/", "--")]
    name += [config["press_name"], f"{config['compression_ratio']:.2f}"]
    name += [f"fraction{config['fraction']:.3f}"] if config["fraction"] < 1 else []
    name += ["compressed_questions"] if aware else []
    folder = to / "__".join(filter(None, name))
    folder.mkdir(parents=True, exist_ok=True)
    scores: dict[str, list[float]] = {}
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        scores.setdefault(row.cell.task, []).extend(row.each.score)
        for index, said in zip(row.each.tags["row"], row.each.output or []):
            columns: Mapping[str, Any] = source[int(index)]
            kept = {key: value for key, value in columns.items() if key != "context"}
            lines[int(index)] = kept | {
                "predicted_answer": said,
                "compression_ratio": config["compression_ratio"],
            }
    (folder / "metrics.json").write_text(json.dumps(suite.totals(scores), indent=4) + "\n", "utf-8")
    with (folder / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(key for line in lines.values() for key in line)))
        table.writeheader()
        table.writerows(lines[index] for index in sorted(lines))
    _write_yaml(folder / "config.yaml", config)
    return folder


def _config(
    suite: Suite, policy: Policy, rows: Sequence[Row], *, total: int, aware: bool, device: str
) -> dict[str, Any]:
    """kvpress's options, as far as they mean something here; the last one is the policy in our words."""
    samples = sum(row.cell.samples for row in rows)
    return {
        "dataset": suite.benchmark,
        "data_dir": suite.folders[0] if len(suite.folders) == 1 and suite.task is None else None,
        "model": rows[0].model,
        "device": device,
        "press_name": press(policy),
        "compression_ratio": round(ratio(policy, rows), 6),
        "fraction": samples / total,
        "max_new_tokens": None,
        "max_context_length": None,
        "compress_questions": aware,
        "press_init_command": f"kvjax.policy({repr(policy)!r})",
    }


def _write_yaml(file: Path, config: dict[str, Any]) -> None:
    import yaml

    file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
