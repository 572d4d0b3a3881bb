"""Writes the card of the embedded model's gates and head pattern from the logs beside the files.

python -m train.embedded.gate_card --config configs/gates/embedded.yaml \\
    --duo configs/gates/duo-embedded.yaml --out kvjax/assets/embedded/weights

Every number comes from ``write_gate/NAME.jsonl`` and ``duo/default.jsonl``; only the prose is written here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from kvjax.weights import read_weights

HEADER = """# Learned weights of the embedded model

`write_gate/` holds those of `--policy wg-kv`: a gate per layer and KV head that says, when a token is
written, whether it outlives the window of {window} tokens (WG-KV,
[arXiv 2512.17452](https://arxiv.org/abs/2512.17452)).
Trained by `train.gates` on the frozen model: mean squared error of the hidden states after the final norm to
those of the untouched model, plus lambda times what the gates keep (cost `{cost}`). At inference a token is
kept where its gate is at least {tau}. `duo/` holds the head pattern of `--policy duo`
(DuoAttention, [arXiv 2410.10819](https://arxiv.org/abs/2410.10819)), learned by `train.duo`.

Every file is bound to the weights of `../model.safetensors` by a fingerprint in its header.
"""

TEXTS = {
    "books": """The rows of `train/embedded/data.py`: book text, needles and the model's tasks from the same
public-domain books and permissively licensed sets as the model itself (see its card). Checks use held-out
books, words and rows.
""",
    "stand-in": """The rows of `train/embedded/data.py`, needles and the model's tasks, **in text that a small
grammar writes** (`train/text.py`): the runs found no books, because `KVJAX_DATA` named none. Checks use
held-out words and rows of the same kind. What the weights do to real text is measured in `results/wg_kv`.
""",
}
"""The section on data, by the text that ``gate_rows.record_text`` wrote."""


PARTS = ("write_gate", "duo")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_check(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line of a check."""
    return [line for line in log if "time" in line][-1]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def table(config: dict[str, Any], folder: Path) -> str:
    """What each lambda keeps and loses, by length."""
    lengths = config["check"]["lengths"]
    head = ("file", "lambda", "length", "mean gate, %", "kept at tau, %", "loss, soft", "loss, tau")
    text = _row(*head) + _row(*["---"] * len(head))
    for name, lam in config["loss"]["lambdas"].items():
        check = last_check(records(folder / f"write_gate/{name}.jsonl"))
        for n in lengths:
            gate, kept = (f"{100 * check[f'{key}_{n}']:.1f}" for key in ("gate", "kept"))
            soft, hard = (f"{check[f'{key}_{n}']:.4f}" for key in ("soft", "hard"))
            text += _row(name, lam, n, gate, kept, soft, hard)
    return text


def recall(config: dict[str, Any], folder: Path) -> str:
    """Needles found through thresholded gates."""
    needles = config["check"]["needles"]
    keys = [f"found_{a['keys']}_of_{a['length']}" for a in needles]
    heads = [f"{a['keys']} hidden, {a['length']} tokens (n = {a['count']}), %" for a in needles]
    text = _row("file", *heads) + _row(*["---"] * (1 + len(heads)))
    for name in config["loss"]["lambdas"]:
        check = last_check(records(folder / f"write_gate/{name}.jsonl"))
        text += _row(name, *(f"{100 * check[key]:.0f}" for key in keys))
    return text


def runs(config: dict[str, Any], path: Path, folder: Path) -> str:
    """Commands, seeds, steps."""
    text = ""
    for name in config["loss"]["lambdas"]:
        steps, seed = records(folder / f"write_gate/{name}.jsonl")[-1]["step"], config["seed"]
        command = f"    python -m train.gates --config {path} --strength {name}"
        text += f"{command}      # {steps} steps, seed {seed}\n"
        text += f"{command} --export {folder}/write_gate/{name}.safetensors\n"
    return text


def card(gates: Path, duo: Path, folder: Path) -> str:
    """The whole README of a folder of weights."""
    config, pattern = (yaml.safe_load(path.read_text()) for path in (gates, duo))
    gate, data = config["gate"], config["data"]
    text = HEADER.format(window=gate["window"], cost=config["loss"]["cost"], tau=gate["tau"])
    text += "\n## What they keep and lose\n\nHeld-out rows of the training mixture, "
    text += f"{config['check']['rows']} a length; tokens of the last window are not counted; float32. The\n"
    text += "losses are the distillation loss, under the gates as trained and under the thresholded ones.\n\n"
    text += table(config, folder) + "\nNeedles found in held-out text through the thresholded gates:\n\n"
    text += recall(config, folder) + "\n"
    for name in config["loss"]["lambdas"]:
        text += f"![Gates of each head, {name}](write_gate/{name}.png)\n"
    text += "\n## Training\n\n" + runs(config, gates, folder)
    lengths = ", ".join(map(str, data["lengths"]))
    text += f"\n{data['tokens']} tokens a batch, rows of {lengths}. Logs: `write_gate/NAME.jsonl`.\n"
    files = [file for part in PARTS for file in sorted((folder / part).glob("*.safetensors"))]
    used = sorted({read_weights(file).notes["text"] for file in files})
    text += "\n" + pattern_part(pattern, duo, folder) + "\n## Data and licences\n\n"
    return text + "\n".join(TEXTS[name] for name in used) + "\nThe files carry the repository's licence.\n"


def pattern_part(config: dict[str, Any], path: Path, folder: Path) -> str:
    """The learned head pattern."""
    check = last_check(records(folder / "duo/default.jsonl"))
    text = "## Head pattern\n\nalpha of every KV head, 1 a retrieval head, 0 a streaming head "
    text += f"({config['sinks']} sinks, window {config['gate']['window']}):\n\n"
    alphas = {name.split("_", 1)[1]: x for name, x in check.items() if name.startswith("alpha_")}
    text += _row("layer_head", *alphas) + _row(*["---"] * (1 + len(alphas)))
    text += _row("alpha", *(f"{x:.3f}" for x in alphas.values()))
    text += f"\nDistillation loss at the answers {check['distill']:.4f}, mean alpha {check['alpha']:.3f}.\n\n"
    steps = records(folder / "duo/default.jsonl")[-1]["step"]
    text += f"    python -m train.duo --config {path}      # {steps} steps, seed {config['seed']}\n"
    return text + f"    python -m train.duo --config {path} --export {folder}/duo/default.safetensors\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.gate_card", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="of the gates")
    parser.add_argument("--duo", type=Path, required=True, help="config of the head pattern")
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder of both parts' exported files, gets README.md"
    )
    args = parser.parse_args()
    (args.out / "README.md").write_text(card(args.config, args.duo, args.out))


if __name__ == "__main__":
    main()
