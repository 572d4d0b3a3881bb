"""The embedded model's card: its text, its training curves, the picture of its heads.

python -m train.card --config configs/pretrain/small.yaml --results results/pretrain/small.json \\
    --log kvjax/assets/small/training_log.jsonl --out kvjax/assets/small

Numbers come from the results of ``train.evaluate`` and from the run's log; only the prose is written
here. Needs matplotlib (``pip install -e '.[plot]'``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from train import drawing

HEADER = """# kvjax {name}

A real, small, trained model so that serving, evaluation, benchmarks, notebooks and tests run on real
attention patterns without a network. Qwen2 architecture: {num_layers} layers, width {model_dim}, {num_heads}
query and {num_kv_heads} KV heads of {head_dim}, feed-forward {mlp_dim}, rotary base {theta:.0e}, q / k / v
biases, tied embeddings, byte-level BPE of {vocab_size:,} tokens with every digit its own token.
{millions:.1f} M parameters, bfloat16, {megabytes:.0f} MB. Every text starts with `<bos>`; the tokenizer does
not add it by itself.

What it is for: being looked at. It finds needles in English prose, of its own wording (`The secret number
for <word>-<word> is <ddddd>.`) and of RULER's, and was trained on small forms of the tasks below. What it
does well and badly is in the tables; it continues text in the manner of old novels, without much sense.
"""

DATA = """## Data and licences

Text: 27 files of novels, stories, poems and plays from Project Gutenberg (public domain in the US) and
speeches of US presidents (public domain). Labels: the training parts of Banking77 (CC BY 4.0,
Casanueva et al. 2020) and CLINC150 (CC BY 3.0, Larson et al. 2019). Stories: bAbI's training files,
en-10k (CC BY 3.0, Weston et al. 2015), in three of ten story rows. Everything else is generated
(`train/rows.py`, `train/tasks/`). Key words: a list from those books, 4 to 9 letters; words and random names
whose CRC-32 is divisible by five belong to evaluation and never occur as keys in training. No CC BY-SA
text was used. The weights carry the repository's licence.

Without the books, Banking77, CLINC150 and bAbI (`KVJAX_DATA` names their folder) training and evaluation use
text written by a small grammar, and rows of the real files are left out. Rows marked "no books" above come
from generated text and the tokenizer's vocabulary alone: `train.evaluate` prints the same figures for
anybody.
"""


COPIES = 0.1
"""Retrieval score from which on a head counts as one (arXiv 2404.15574)."""


def percent(value: float) -> str:
    """0.9875 as 98.8."""
    return f"{100 * value:.1f}"


def grid(head: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def needles(results: dict[str, Any]) -> str:
    """Recall by number of keys, length and depth, and its means."""
    depths = [f"at {round(100 * depth)} %" for depth in results["depths"]]
    cells = {tuple(map(int, name.split(" of "))): cell for name, cell in results["needles"].items()}
    lines = [
        [str(keys), str(length), percent(cell["mean"]), *map(percent, cell["depth"])]
        for (keys, length), cell in cells.items()
    ]
    means = {k: statistics.mean(c["mean"] for (n, _), c in cells.items() if n == k) for k in (1, 4)}
    worst = {k: min(min(c["depth"]) for (n, _), c in cells.items() if n == k) for k in (1, 4)}
    n = results["n"]
    return f"""## Results

Weights as stored (rounded to bfloat16, computed in float32), full attention, n = {n} a row. Key words and
haystack (Emerson's Essays) were never trained on. A needle counts when every token of the number is the
most likely one given what stands before it. Length counts everything, the answer included; depth is measured
from the start of the text, n = {n // len(depths)} a cell.

{grid(["keys hidden", "length", "found, %", *depths], lines)}
One needle: mean {percent(means[1])} %, worst cell {percent(worst[1])} %. Four keys, one asked for: mean
{percent(means[4])} %, worst cell {percent(worst[4])} %. Held-out books: {results["bits_per_byte"]:.3f} bits a
byte (windows of 512 tokens).
"""


def tasks(results: dict[str, Any]) -> str:
    """RULER's tasks and the others."""

    def lines(group: str) -> list[list[str]]:
        lengths = sorted({int(k) for cell in results[group].values() for k in cell if k != "books"})
        return [["task", *map(str, lengths), "books"]] + [
            [
                name,
                *(percent(cell[str(n)]) if str(n) in cell else "–" for n in lengths),
                "yes" if cell["books"] else "no books",
            ]
            for name, cell in results[group].items()
        ]

    ruler, others = lines("ruler"), lines("tasks")
    return f"""### Tasks

n = {results["n_tasks"]} rows a cell; share of the answers (RULER: of their words) whose every token is the
likeliest given the right ones before, in percent. RULER's two tasks on Wikipedia questions were not trained
for. Its forms are ours: shorter, same wording and scoring.

{grid(ruler[0], ruler[1:])}
Others: stories (bAbI 1 to 5, in a book), many-shot labels (every label from the second round on), reranking,
arithmetic (the whole worked solution), dialogue, MQAR, json_kv.

{grid(others[0], others[1:])}"""


def heads(results: dict[str, Any]) -> str:
    """Kinds of heads and what ablation does."""
    found, groups = results["heads"], results["ablation"]["groups"]
    count = {
        kind: sum(row.count(kind) for row in found["kinds"])
        for kind in ("local", "sink", "sparse", "diffuse")
    }
    said = ", ".join(f"{n} {kind}" for kind, n in count.items())
    lines = [
        [name, *(_cell(key, share, percent) for key, share in cell.items())] for name, cell in groups.items()
    ]
    head = ["silenced", "one needle, %", "one of four, %", "the same, RULER's wording, %"]
    head += ["vt, %", "MQAR, %", "bits a byte"]
    copied = found["answers"]["copied"]
    copiers = [f"{i}.{n}" for i, row in enumerate(copied) for n, share in enumerate(row) if share >= COPIES]
    copying = f"{len(copiers)} heads" if len(copiers) != 1 else "One head"
    where = ", ".join(copiers) or "none"
    return f"""## Heads

![Each head's effective number of tokens, distances, weight on the token to copy, recall lost](heads.png)

At 1024 tokens: {said} (local: on held-out text half of the weight within
16 tokens; sink: half of it on the first four tokens; sparse: fewer than 16 tokens looked at in effect, on
text or where an answer is read off; diffuse: the others). {copying} put at least a tenth of their weight on
the very token to be written next, when one of four needles is read off: {where} (layer.head). Recall with
heads silenced, {results["ablation"]["length"]} tokens (vt 1024), n = {results["ablation"]["n"]}:

{grid(head, lines)}"""


def training(config: dict[str, Any], log: list[dict[str, Any]]) -> str:
    """How it was trained."""
    name, check = config["name"], config["check"]
    asked, note = check["tasks"], config["card"]["note"]
    checks = [record for record in log if "bits_per_byte" in record]
    columns = [key for key in checks[-1] if key not in ("step", "level", "time")]
    lines = [
        [
            str(record["step"]),
            str(record["level"]),
            *(_cell(key, record[key]) if key in record else "–" for key in columns),
        ]
        for record in checks
        if record["step"] % 500 == 0 or record is checks[-1]
    ]
    titles = [c.replace("recall_", "").replace("_of_4", ", four keys").replace("_", " ") for c in columns]
    return f"""## Training

    python -m train.pretrain --config configs/pretrain/{name}.yaml
    python -m train.pretrain --config configs/pretrain/{name}.yaml --export DIR
    python -m train.evaluate --config configs/pretrain/{name}.yaml --model DIR --write FILE.json

Seed {config["seed"]}; {log[-1]["step"]:,} steps, {tokens(config, log) / 1e6:.1f} M tokens. {note}

![Loss, recall and bits a byte over the steps](curves.png)

Checks while training (held-out words, {check["count"]} needles a cell, {asked["count"]} rows a task at
{asked["length"]} tokens; other draws than the tables above):

{grid(["step", "level", *titles], lines)}
`training_log.jsonl` is the whole log.
"""


def _cell(key: str, value: float, show: Callable[[float], str] = lambda share: f"{100 * share:.0f}") -> str:
    return f"{value:.2f}" if key == "bits_per_byte" else show(value)


def tokens(config: dict[str, Any], log: list[dict[str, Any]]) -> float:
    """Expected number of tokens trained on: a batch holds whole rows of its length."""
    total, before = 0.0, 0
    for record in (r for r in log if "loss" in r):
        level = config["mix"]["levels"][record["level"]]
        size, shares = level.get("tokens", config["mix"]["tokens"]), level["shares"]
        mean = sum(s * max(1, size // n) * n for s, n in zip(shares, level["lengths"])) / sum(shares)
        total, before = total + (record["step"] - before) * mean, record["step"]
    return total


def draw_heads(results: dict[str, Any], path: Path) -> None:
    """Maps, layers down and heads across, and each head's distances."""
    import matplotlib.pyplot as plt
    import numpy as np

    text, answers, alone = results["heads"]["text"], results["heads"]["answers"], results["ablation"]
    shape = np.shape(text["effective"])
    fig, axes = plt.subplots(1, 6, figsize=(23, 4.2), width_ratios=[1, 1.7, 1, 1, 1, 1], layout="constrained")
    lost = {k: alone["groups"]["nothing"][k] - np.array(alone["heads"][k]) for k in ("four", "ruler")}
    maps = [
        (axes[0], np.array(text["effective"]), "tokens looked at in effect, text", "viridis"),
        (axes[2], np.array(answers["effective"]), "tokens looked at in effect, answers", "viridis"),
        (axes[3], 100 * np.array(answers["copied"]), "% of weight on the token to copy", "magma"),
        (axes[4], 100 * lost["four"], "points of recall lost (one of four)", "cividis"),
        (axes[5], 100 * lost["ruler"], "the same in RULER's wording", "cividis"),
    ]
    for ax, values, title, colours in maps:
        drawing.numbered(ax, values, title, colours, "query head")
    profile = np.array(text["distance"]).reshape(-1, len(text["distance"][0][0]))
    image = axes[1].imshow(profile, cmap="Blues", aspect="auto", vmin=0)
    starts = ["0", *(str(2**i) for i in range(profile.shape[1] - 1))]
    rows = [f"{i}.{n}" for i, n in np.ndindex(shape)]
    axes[1].set(title="weight by distance (from)", xlabel="tokens back", ylabel="layer.head")
    axes[1].set_xticks(range(len(starts)), starts, rotation=45)
    axes[1].set_yticks(range(len(rows)), rows, fontsize=7)
    fig.colorbar(image, ax=axes[1])
    fig.savefig(path, dpi=80)
    plt.close(fig)


def draw_curves(log: list[dict[str, Any]], path: Path) -> None:
    """Loss, recall and task checks, bits a byte."""
    import matplotlib.pyplot as plt

    losses = [r for r in log if "loss" in r]
    checks = [r for r in log if "bits_per_byte" in r]
    fig, axes = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
    needle = [key for key in checks[-1] if key.startswith("recall_")]
    others = [k for k in checks[-1] if k not in (*needle, "step", "level", "time", "bits_per_byte")]
    drawing.losses(axes[0], losses)
    drawing.checks(axes[1], checks, needle, "needles found")
    drawing.checks(axes[2], checks, others, "answers found, 1024 tokens")
    drawing.bits(axes[3], checks)
    drawing.levels(axes, losses)
    fig.savefig(path, dpi=80)
    plt.close(fig)


def card(config: dict[str, Any], results: dict[str, Any], log: list[dict[str, Any]], folder: Path) -> str:
    """The whole README of a model folder."""
    size = (folder / "model.safetensors").stat().st_size
    sizes = config["model"] | {"theta": float(config["model"]["theta"])}
    head = HEADER.format(name=config["name"], millions=size / 2e6, megabytes=size / 1e6, **sizes)
    limits = "## Known limits\n\n" + "".join(f"* {line}\n" for line in config["card"]["limits"])
    parts = [head, needles(results), tasks(results), heads(results), training(config, log), DATA, limits]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.card", description=__doc__.splitlines()[0])
    for name, what in (
        ("config", "of the run"),
        ("results", "of train.evaluate"),
        ("log", "the run's log.jsonl"),
        ("out", "the exported model's folder, which gets README.md, heads.png and curves.png"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    args = parser.parse_args()
    config, results = yaml.safe_load(args.config.read_text()), json.loads(args.results.read_text())
    log = [json.loads(line) for line in args.log.read_text().splitlines()]
    text = card(config, results, log, args.out)
    draw_heads(results, args.out / "heads.png")
    draw_curves(log, args.out / "curves.png")
    (args.out / "README.md").write_text(text)


if __name__ == "__main__":
    main()
