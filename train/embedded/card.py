"""Writes the embedded model's card: its results beside its aims, and pictures.

python -m train.embedded.card --config configs/pretrain/embedded.yaml --aims results/pretrain/embedded.json \\
    --log kvjax/assets/embedded/training_log.jsonl --out kvjax/assets/embedded

Numbers come from the results of ``train.embedded.aims`` and from the run's log; only the prose is written
here. Needs matplotlib (``pip install -e '.[plot]'``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from train import loop
from train.embedded import drawing

HEADER = """# kvjax {name}

A real, small, trained model so that serving, evaluation, benchmarks, notebooks and tests run on real
attention patterns without a network. Qwen2 architecture: {num_layers} layers, width {model_dim}, {num_heads}
query and {num_kv_heads} KV heads of {head_dim}, feed-forward {mlp_dim}, rotary base {theta:.0e}, q / k / v
biases, tied embeddings, byte-level BPE of {vocab_size:,} tokens with numbers of up to three digits as one.
{millions:.1f} M parameters, bfloat16, {megabytes:.0f} MB. Every text starts with `<bos>`; the tokenizer does
not add it by itself.

What it is for: being looked at. Several heads in several layers copy; facts are found in wordings it never
met. What it does well and badly is in the tables; it continues text in the manner of old novels, without much
sense.
"""

SAYS = {
    "sentence": "a repeated sentence of held-out prose, its tokens behind the first three",
    "trained": "needles in ten trained wordings",
    "untrained": "needles in ten wordings never trained",
    "paraphrased": "the question paraphrased",
    "four_keys": "four keys, one asked for",
    "ruler_single": "RULER, single needles",
    "ruler_multikey": "RULER, several keys",
    "ruler_multivalue": "RULER, several values",
    "ruler_multiquery": "RULER, several questions",
    "vt": "RULER, variable tracking",
    "retrieving_heads": "KV heads with a tenth of their weight on the token to copy",
    "retrieving_layers": "layers that have one",
    "without_any_head": "needles without whichever KV head matters most",
    "without_any_layers_retrieving_heads": "needles without all retrieving heads of whichever layer",
    "least_kind": "share of the rarest kind of head",
    "lowest_entropy": "lowest normalised entropy of the middle region",
    "highest_entropy": "highest normalised entropy of the middle region",
    "calibration_error": "calibration error of the next token on prose",
    "sure": "share of sure steps, prose and predictable text together",
    "autocorrelation": "autocorrelation of confidence at lag 1, predictable text",
    "bits_per_byte": "bits a byte on held-out books",
}
"""Each aim in words: the lines of the card."""


DATA = """## Data and licences

Text: 27 files of novels, stories, poems and plays from Project Gutenberg (public domain in the US) and
speeches of US presidents (public domain). Everything else is generated (`train/rows.py`,
`train/embedded/tasks/`). Key words: a list from those books, 4 to 9 letters; words and random names whose
CRC-32 is divisible by five belong to evaluation and never occur as keys in training. No CC BY-SA text was
used. The weights carry the repository's licence.

Without the books (`KVJAX_DATA` names their folder) training and evaluation use text written by a small
grammar. RULER's rows without books come from generated text and the tokenizer's vocabulary alone.
"""


def percent(value: float) -> str:
    """0.9875 as 98.8."""
    return f"{100 * value:.1f}"


def grid(head: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def aims(results: dict[str, Any]) -> str:
    """Every aim, met or missed."""
    lines = [
        [SAYS[name], f"{row['is']:g}", row["aim"], "met" if row["met"] else "**missed**"]
        for name, row in results["aims"].items()
    ]
    lengths = ", ".join(map(str, results["lengths"]))
    return f"""## What it had to show

Weights as stored, full attention, held-out words, texts and names; n = {results["n"]["recall"]} for each
group and length ({lengths} tokens), {results["n"]["ruler"]} for each of RULER's. Of recalls
the lowest over lengths counts, of wordings the mean.

{grid(["", "is", "aim", ""], lines)}"""


def recalls(results: dict[str, Any]) -> str:
    """By length: groups, kinds of values, RULER's tasks; each wording alone."""
    lengths = list(map(str, results["lengths"]))
    cells = lambda row: [percent(row[n]) if n in row else "–" for n in lengths]  # noqa: E731
    groups = {**results["recall"], **{f"value: {name}": row for name, row in results["values"].items()}}
    groups |= {f"RULER {name}": row for name, row in results["ruler"].items()}
    by_wording = [
        [f"`{one['hide']}`", one["kind"], name, *cells(one["recall"])]
        for name, wordings in results["wordings"].items()
        for one in wordings
    ]
    return f"""## Recall

Percent; an answer counts when its every token is the likeliest given the right ones before it.

{grid(["", *lengths], [[name, *cells(row)] for name, row in groups.items()])}
Each wording, n = {max(1, results["n"]["wordings"] // 10)} a cell:

{grid(["statement", "value", "wording", *lengths], by_wording)}"""


def tasks(results: dict[str, Any]) -> str:
    """The other tasks, those it was not trained for among them."""
    lengths = [n for n in map(str, results["lengths"]) if any(n in row for row in results["tasks"].values())]
    lines = [[name, *(percent(row[n]) for n in lengths)] for name, row in results["tasks"].items()]
    return f"""## Other tasks

Percent, n = {results["n"]["tasks"]} a cell: stories (bAbI 1 to 5, in a book), many-shot labels (every
label from the second round on), reranking, arithmetic (the whole worked solution), dialogue, MQAR (pairs),
json_kv (associations). Of these only dialogue, pairs and associations were trained.

{grid(["task", *lengths], lines)}"""


def heads(results: dict[str, Any]) -> str:
    """What is lost without heads."""
    silenced, measured = results["silenced"], results["heads"]
    lines = [["nothing", *map(percent, silenced["nothing"].values())]]
    for layer, row in enumerate(silenced["heads"]):
        lines += [[f"KV head {layer}.{k}", *map(percent, cell.values())] for k, cell in enumerate(row)]
    lines += [
        [f"all retrieving ones of layer {layer}", *map(percent, cell.values())]
        for layer, cell in silenced["layers"].items()
    ]
    where = ", ".join(f"{layer}.{head}" for layer, head in measured["retrieving"])
    flat = [kind for row in measured["kinds"] for kind in row]
    kinds = ", ".join(f"{flat.count(kind)} {kind}" for kind in ("local", "sink", "sparse", "diffuse"))
    return f"""## Heads

![Weight on the token to copy, on a value's later tokens, entropy](heads.png)

KV heads that retrieve (layer.head): {where}. Query heads by kind: {kinds}. Recall with heads silenced,
{silenced["length"]} tokens, n = {silenced["n"]}:

{grid(["silenced", "needles, %", "ten trained wordings, %"], lines)}"""


def confidence(results: dict[str, Any]) -> str:
    """What confidence says of what comes."""
    parts = results["confidence"]
    share = lambda kinds: " / ".join(percent(v) for v in kinds.values()) if kinds else "–"  # noqa: E731
    rows: list[tuple[str, Any]] = [
        ("steps", lambda p: str(p["steps"])),
        ("calibration error", lambda p: f"{p['calibration_error']:.3f}"),
        ("sure steps (c ≥ 0.7), %", lambda p: percent(p["sure"])),
        ("of them copies / words continued / others, %", lambda p: share(p["sure_kinds"])),
        ("of all steps", lambda p: share(p["all_kinds"])),
        ("autocorrelation at lag 1", lambda p: f"{p['autocorrelation']['1']:.2f}"),
        ("nats a token that 192 more slots gain", lambda p: f"{p['gain']:.3f}"),
        *(
            (
                f"correlation with the gain of the next {h} steps",
                lambda p, h=h: f"{p['gain_correlation'][h]:.3f}",
            )
            for h in parts["both"]["gain_correlation"]
        ),
        ("nll, few slots when sure", lambda p: f"{p['schedules']['tight_when_sure']:.4f}"),
        ("nll, few slots when least sure", lambda p: f"{p['schedules']['tight_when_least_sure']:.4f}"),
        ("nll, few slots at random", lambda p: f"{p['schedules']['tight_at_random']:.4f}"),
    ]
    lines = [[name, *(cell(part) for part in parts.values())] for name, cell in rows]
    return f"""## Confidence

c of CONF-KV with its default weights, on rows of 1024 tokens; 4 sinks and a window of 64 or 256 slots.

{grid(["", *parts], lines)}"""


def training(config: dict[str, Any], log: list[dict[str, Any]]) -> str:
    """How it was trained."""
    name = config["name"]
    checks = [record for record in log if "bits_per_byte" in record]
    columns = [key for key in checks[-1] if key not in ("step", "level", *loop.CLOCK)]
    lines = [
        [str(r["step"]), str(r["level"]), *(_figure(key, r.get(key)) for key in columns)] for r in checks
    ]
    titles = [c.replace("recall_", "").replace("_of_4", ", four keys").replace("_", " ") for c in columns]
    return f"""## Training

    python -m train.embedded.pretrain --config configs/pretrain/{name}.yaml
    python -m train.embedded.pretrain --config configs/pretrain/{name}.yaml --export DIR
    python -m train.embedded.aims --config configs/pretrain/{name}.yaml --model DIR --write FILE.json

Seed {config["seed"]}; {log[-1]["step"]:,} steps, {tokens(config, log) / 1e6:.1f} M tokens.

![Loss, recall and bits a byte over the steps](curves.png)

Checks while training (held-out words; few rows a cell, other draws than above):

{grid(["step", "level", *titles], lines)}
`training_log.jsonl` is the whole log.
"""


def _figure(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if key == "bits_per_byte" else f"{100 * value:.0f}"


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
    """Maps, layers down and heads across."""
    import matplotlib.pyplot as plt

    measured = results["heads"]
    value = np.array(measured["value"])
    maps = [
        (100 * np.array(measured["sentence"]), "repeated sentence: % on the token to write", "magma"),
        (100 * np.array(measured["fact"]), "one of four facts: % on the token to write", "magma"),
        (100 * value[..., 1:].sum(-1), "before a value: % on its 2nd to 4th token", "magma"),
        (100 * np.array(measured["entropy"]), "entropy of the middle region, % of the largest", "viridis"),
    ]
    fig, axes = plt.subplots(1, len(maps), figsize=(19, 4), layout="constrained")
    for ax, (cells, title, colours) in zip(axes, maps):
        wide = "entropy" in title
        drawing.numbered(
            ax, cells, title, colours, "query head" if wide else "KV head", 100 if wide else cells.max()
        )
    fig.savefig(path, dpi=80)
    plt.close(fig)


def draw_curves(log: list[dict[str, Any]], path: Path) -> None:
    """Loss, recall, bits a byte."""
    import matplotlib.pyplot as plt

    losses = [r for r in log if "loss" in r]
    checks = [r for r in log if "bits_per_byte" in r]
    fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    names = [k for k in checks[-1] if k not in ("step", "level", *loop.CLOCK, "bits_per_byte")]
    drawing.losses(axes[0], losses)
    drawing.checks(axes[1], checks, names, "recall")
    drawing.bits(axes[2], checks)
    drawing.levels(axes, losses)
    fig.savefig(path, dpi=80)
    plt.close(fig)


def card(config: dict[str, Any], results: dict[str, Any], log: list[dict[str, Any]], folder: Path) -> str:
    """The whole README of a model folder."""
    size = (folder / "model.safetensors").stat().st_size
    sizes = config["model"] | {"theta": float(config["model"]["theta"])}
    head = HEADER.format(name=config["name"], millions=size / 2e6, megabytes=size / 1e6, **sizes)
    limits = "## Known limits\n\n" + "".join(f"* {line}\n" for line in config["card"]["limits"])
    made = [part(results) for part in (aims, recalls, tasks, heads, confidence)]
    return "\n".join(part.rstrip() + "\n" for part in (head, *made, training(config, log), DATA, limits))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.card", description=__doc__.splitlines()[0]
    )
    for name, what in (
        ("config", "of the run"),
        ("aims", "results of train.embedded.aims"),
        ("log", "the run's log.jsonl"),
        ("out", "the exported model's folder, which gets README.md, heads.png and curves.png"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    args = parser.parse_args()
    config, results = yaml.safe_load(args.config.read_text()), json.loads(args.aims.read_text())
    log = [json.loads(line) for line in args.log.read_text().splitlines()]
    text = card(config, results, log, args.out)
    draw_heads(results, args.out / "heads.png")
    draw_curves(log, args.out / "curves.png")
    (args.out / "README.md").write_text(text)


if __name__ == "__main__":
    main()
