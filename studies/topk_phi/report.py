"""``report.md`` and its pictures, from the JSON files of the studies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.reads import written
from studies.topk_phi import even, pictures, sweep, tables

Found = dict[str, Any]


def write(folder: Path) -> list[Path]:
    """Everything the folder's files allow."""
    files, text = [], ["# Top-K and φ, measured", "", "Made by `python -m studies.topk_phi report`.", ""]
    every = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("heads_*.json"))]
    for tree in sorted(every, key=lambda one: (one["for"] != "the prompt's middle", one["prompt"])):
        picture = pictures.draw(tree, folder / f"heads_{tree['name']}.png")
        files.append(picture)
        text += [*heads(tree), "", f"![Errors and entropies]({picture.name})", ""]
        if tree["for"] == "the prompt's middle":
            text += [*generated(tree), ""]
    if (file := folder / "even.json").exists():
        tree = json.loads(file.read_text(encoding="utf-8"))
        text += ["## When φ pays", "", "K': tokens that are read in the time of K tokens and φ.", ""]
        text += [even.table(tree["paper"], tree["measured"]), ""]
    text += tables.text([folder / "quality", folder / "books"])
    (folder / "report.md").write_text("\n".join(text), encoding="utf-8")
    return [folder / "report.md", *files]


def heads(tree: Found) -> Iterator[str]:
    """Tables of one set of maps."""
    counts = tree["counts"]
    yield f"## Heads: maps `{tree['maps']}`, prompts of {tree['prompt']}, for {tree['for']}"
    yield ""
    size = f"{tree['layers']} layers x {tree['heads']} query heads"
    yield (
        f"{tree['sequences']} held-out sequences, {size}. Mean relative L1 error of attention's output, %: "
        "selection alone / with φ, by tokens K that both retrieve."
    )
    if silent := tree.get("silent"):
        names = ", ".join("{}.{}".format(*divmod(head, tree["heads"])) for head in silent)
        yield ""
        yield f"Without φ are {len(silent)} query heads (layer.head): {names}."
    yield ""
    yield "| heads | entropy | " + " | ".join(f"K = {c}" for c in counts) + " |"
    yield "|" + "---|" * (2 + len(counts))
    for number, one in enumerate(tree["quartiles"], 1):
        low, high = one["entropy"]
        yield f"| quarter {number} | {low:.2f} – {high:.2f} | {_pairs(one['alone'], one['completed'])} |"
    means = {n: [float(np.mean(row)) for row in tree["by_head"][n]] for n in ("alone", "completed")}
    yield f"| all | | {_pairs(means['alone'], means['completed'])} |"
    if after := tree.get("after_wo"):
        pairs = " | ".join(f"{a:.2f} / {b:.2f}" for a, b in zip(after["alone"], after["completed"]))
        yield f"| all, L2 after W_o, root of the heads' summed squares | | {pairs} |"
    yield ""
    yield "Gain in points (95 % over sequences), and the share of heads that φ helps:"
    yield ""
    yield "| heads | " + " | ".join(f"K = {c}" for c in counts) + " |"
    yield "|" + "---|" * (1 + len(counts))
    for number, one in enumerate(tree["quartiles"], 1):
        cells = [
            f"{100 * mean:+.1f} ({100 * low:+.1f} … {100 * high:+.1f}), {100 * helped:.0f} %"
            for (mean, low, high), helped in zip(one["gain"], one["helped"])
        ]
        yield f"| quarter {number} | {' | '.join(cells)} |"
    yield ""
    listed = ", ".join(f"{r:+.2f} at K = {c}" for c, r in zip(counts, tree["correlation"]))
    yield f"Rank correlation of a head's entropy with its gain: {listed}."
    yield ""
    yield "Tokens that φ needs for the mean error of selection alone (the paper: 1.8 times fewer):"
    yield ""
    yield "| selection alone | error, % | beside φ | times fewer | with φ's summary | times fewer |"
    yield "|---|---|---|---|---|---|"
    for one in tree["fewer"]:
        yield f"| {one['alone']} | {100 * one['error']:.1f} | {_needed(one, tree['summary'])} |"


def generated(tree: Found) -> Iterator[str]:
    """The budgets of answers of several lengths."""
    rows = sweep.rows(tree)
    yield f"### Budgets over the length of the answer, {tree['prompt']} tokens"
    yield ""
    yield "Tokens retrieved, and the mean error in % at so many; φ's reading spread over L steps."
    yield ""
    yield "| share | selection alone | " + " | ".join(f"φ, L = {n}" for n in rows[0]["steps"]) + " |"
    yield "|" + "---|" * (2 + len(rows[0]["steps"]))
    for row in rows:
        cells = [_budget(row["alone"], row["alone_error"])]
        cells += [_budget(k, error) for k, error in zip(row["completed"], row["completed_error"])]
        yield f"| {row['share']:g} | {' | '.join(cells)} |"


def _pairs(alone: list[float], completed: list[float]) -> str:
    return " | ".join(f"{100 * a:.1f} / {100 * b:.1f}" for a, b in zip(alone, completed))


def _needed(one: Found, summary: float) -> str:
    """Tokens beside φ and how many times fewer they are; the same with its summary, read once, among them."""
    if one["completed"] is None:
        return "more than were tried | – | – | –"
    cells = []
    for count in (one["completed"], one["completed"] + summary):
        cells += [f"{count:.1f}", f"{one['alone'] / count:.2f}" if count else "all"]
    return " | ".join(cells)


def _budget(count: int | None, error: float | None) -> str:
    return written(count) if error is None else f"{written(count)} ({100 * error:.1f})"
