"""Who measured what on which device: one page of all folders of results that are at hand.

A board is a suite, or kvjax's own tasks at one length, of one model. A policy stands on it if it was measured
on every task and sample that the full cache was; its score is the plain mean over the tasks, as RULER's and
kvpress's are. A cell that says nothing about its device is of a time before devices were recorded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.eval.measure.row import Row
from kvjax.eval.measure.store import RESULTS, read
from kvjax.eval.report.table import markdown
from kvjax.eval.suites.suite import SUITES
from kvjax.eval.tasks import ORDER

LEAST = 200
"""Samples of a cell of kvjax's own tasks: fewer are too few for a place on a board."""

OWN = "kvjax's own tasks"

HEAD = """\
# Leaderboard

Quality against what is kept, on models and benchmarks that others know, as far as somebody has measured it.
Made of the rows that exist by

    {command}

A row on a model of yours, on one device. Data set and model come from the hub. The command says beforehand
how many rows fit, how many hours it takes and, with `--price`, what it costs; it goes on where it stopped:

    pip install -e '.[suites]'
    python -m kvjax.eval run --suite kvpress-ruler-4k --model Qwen/Qwen3-8B \\
        --policy "snapkv(64) + uniform({{}})" --policy "adakv" \\
        --by "YOUR NAME" --out results/leaderboard/qwen3-8b

`{{}}` is what stays where kvpress's ratios 0.25, 0.5, 0.75 and 0.875 are removed. `--protocol aware`
compresses the question, too. The folder also gets `kvpress/`, the layout of kvpress's own results. Suites:
{suites}, `longbench-TASK`.

RULER at other lengths, by lm-eval's own generators and scores; it goes on where it stopped, too:

    pip install -e '.[eval]' 'lm_eval[ruler]' transformers
    python -m kvjax.eval.harness --model kvjax --tasks ruler --use_cache qwen3-8b-adakv \\
        --model_args "pretrained=Qwen/Qwen3-8B,policy=adakv" \\
        --metadata '{{"max_seq_lengths": [32768, 65536, 131072]}}'
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A policy on a board.

    Attributes:
      policy, weights, protocol: of its cells.
      score: mean over tasks, in percent.
      kept, bytes: shares of the full cache when the answer begins, in percent.
      tasks, samples: how many; samples of all tasks together.
      by, device, day: who measured, on what, when; "" where the folder does not say.
    """

    policy: str
    weights: str
    protocol: str
    score: float
    kept: float
    bytes: float
    tasks: int
    samples: int
    by: str
    device: str
    day: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Board:
    """A suite, or own tasks at a length, of a model; standings from the highest score down.

    Attributes:
      name, model: what was measured.
      folder: with the rows.
      standings: of its policies, the full cache's among them.
    """

    name: str
    model: str
    folder: Path
    standings: tuple[Standing, ...]


def boards(folders: Sequence[Path]) -> list[Board]:
    """The boards of some folders of results; folders without finished cells have none."""
    found = []
    for folder in folders:
        rows = read(folder) if (folder / RESULTS).is_file() else []
        facts = _facts(folder)
        names: dict[tuple[str, str, int], list[Row]] = {}
        for row in rows:
            if row.score is None or (row.group in ORDER and row.cell.samples < LEAST):
                continue
            name = row.group if row.group not in ORDER else f"{OWN} at {row.cell.length:,} tokens"
            names.setdefault((name, row.model, row.cell.seed), []).append(row)
        for (name, model, _), own in names.items():
            if standings := _standings(own, facts):
                found.append(Board(name=name, model=model, folder=folder, standings=standings))
    return found


def _facts(folder: Path) -> dict[str, Any]:
    file = folder / "suite.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _standings(rows: Sequence[Row], facts: dict[str, Any]) -> tuple[Standing, ...]:
    whole = {row.cell.drawn for row in rows if row.cell.policy == "full"}
    by_policy: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        key = (row.cell.policy, row.cell.weights, row.cell.protocol)
        by_policy.setdefault(key, []).append(row)
    made = [
        _standing(*key, own, facts)
        for key, own in by_policy.items()
        if whole and {row.cell.drawn for row in own} == whole
    ]
    return tuple(sorted(made, key=lambda one: -one.score))


def _standing(
    policy: str, weights: str, protocol: str, rows: Sequence[Row], facts: dict[str, Any]
) -> Standing:
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row.cell.task, []).extend(row.each.score)
    counts = [row.cell.samples for row in rows]
    return Standing(
        policy=policy,
        weights=weights,
        protocol=protocol,
        score=100 * float(np.mean([np.mean(scores) for scores in by_task.values()])),
        kept=100 * float(np.average([row.kept_fraction for row in rows], weights=counts)),
        bytes=100 * float(np.average([row.bytes.live / row.bytes.full for row in rows], weights=counts)),
        tasks=len(by_task),
        samples=sum(counts),
        by=facts.get("by") or "",
        device=facts.get("device", ""),
        day=facts.get("day", ""),
    )


def page(found: Sequence[Board], command: str) -> str:
    """The page; ``command`` makes it."""
    parts = [HEAD.format(command=command, suites=", ".join(f"`{name}`" for name in SUITES))]
    public = [board for board in found if not board.name.startswith(OWN)]
    if not any(board.model != "embedded" for board in found):
        parts.append(
            "**Nobody has measured a model that others know yet.** Below are rows of the small model inside\n"
            "the package, on kvjax's own tasks.\n"
        )
    for board in [*public, *(board for board in found if board not in public)]:
        parts.append(_table(board))
    return "\n".join(parts)


def _table(board: Board) -> str:
    lines = []
    for one in board.standings:
        weights = f" ({one.weights})" if one.weights else ""
        measured = [one.by or "the project", one.device or "CPU, not recorded", one.day or "–"]
        lines.append(
            [
                f"`{one.policy}`{weights}",
                one.protocol,
                f"{one.score:.2f}",
                f"{one.kept:.1f}",
                f"{one.bytes:.1f}",
                f"{one.tasks} / {one.samples:,}",
                ", ".join(measured),
            ]
        )
    heads = [
        "policy",
        "question",
        "score",
        "tokens kept, %",
        "bytes, %",
        "tasks / samples",
        "who, device, day",
    ]
    return (
        f"## {board.name}, {board.model}\n\nRows: `{board.folder.as_posix()}`.\n\n{markdown(heads, lines)}\n"
    )


def write(folders: Sequence[Path], to: Path) -> Path:
    """The page of some folders of results, and of all folders beside it."""
    beside = sorted(file.parent for file in to.glob(f"*/{RESULTS}"))
    every = list(dict.fromkeys([*folders, *beside]))
    words = " ".join(folder.as_posix() for folder in folders)
    to.mkdir(parents=True, exist_ok=True)
    file = to / "README.md"
    command = f"python -m kvjax.eval leaderboard {words} --to {to.as_posix()}".replace("  ", " ")
    file.write_text(page(boards(every), command), encoding="utf-8")
    return file
