"""Which heads should rankers leave to chance? Three criteria, and what the model loses by each.

python -m studies.kvp.gates --config configs/ranker/embedded.yaml --file default.safetensors

The two of ``train.ranker.gate``, entropy and output error, and as many heads as by entropy whose trained cost
is nearest to that of a random choice. Loss: nats a token of the end of held-out rows, by kind, and of the
answers of evaluation tasks (of a seed that nothing else is reported on). Heads are chosen on other rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvjax
from kvjax import cli, decode
from kvjax.eval import tasks
from kvjax.eval.measure import batch, runner
from kvjax.eval.measure.row import short
from kvjax.eval.measure.store import versions
from kvjax.eval.report import stats, table
from kvjax.eval.tasks.data import find
from kvjax.eval.tasks.sample import Encoded, Sample, Samples
from kvjax.loading import LanguageModel
from kvjax.types import Params
from kvjax.weights import load_weights
from train import trace_rows
from train.ranker import batches, gate
from train.ranker.settings import Settings, read

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

LENGTH, ENDING = 1024, 64
"""Tokens of a row, and of its end, which is judged."""

TASKS = ("niah_multikey_1", "niah_multikey_2", "vt", "dialogue_recall", "dialogue_ppl")

SEED = 7
"""Of the samples."""

FIRST = 10_000
"""The first held-out row; those by which heads are chosen come before."""


def choices(heads: Mapping[str, Float[np.ndarray, "L K"]]) -> dict[str, Bool[np.ndarray, "L K"]]:
    """The heads that are ranked, by criterion."""
    by = {f"by {name}": criterion(heads) for name, criterion in gate.CRITERIA.items()}
    count = (~by["by entropy"]).sum()
    cost = heads["cost"]
    cheapest = (np.argsort(np.argsort(-cost, axis=None)) >= count).reshape(cost.shape)
    every = np.ones_like(cheapest)
    return {"all ranked": every, **by, "by trained cost": cheapest, "all by chance": ~every}


def held_rows(settings: Settings, model: LanguageModel, count: int) -> dict[str, Samples]:
    """``count`` held-out rows of each kind of the mixture, whose last tokens are the answer."""
    held, index = trace_rows.sequences(settings, model.text).held, FIRST
    rows: dict[str, Samples] = {kind: [] for kind in settings.recording.data["mix"]}
    while any(len(found) < count for found in rows.values()):
        task, tokens = held(np.random.default_rng((settings.seed, 5, index)), LENGTH)
        own, index = rows[batches.kind(task)], index + 1
        if len(own) < count:
            own.append((Sample(context="", answer=""), _ending(tokens.tolist())))
    return rows


def _ending(tokens: list[int]) -> Encoded:
    context = tokens[:-ENDING]
    return Encoded(
        context=context, question=[], prefix=[], answer=tokens[-ENDING:], needed=np.zeros(len(context), bool),
        scored=np.zeros(ENDING, int), labels=(), bytes=1,
    )  # fmt: skip


def losses(
    model: LanguageModel, samples: Samples, policies: Mapping[tuple[str, int], tuple[str, Params]]
) -> dict[tuple[str, int], tuple[list[float], list[int]]]:
    """Nats a token of each sample, and its tokens, by policy; each prompt is read once."""
    rows, parts = runner.batched(samples, LENGTH)
    context = decode.bucket(LENGTH, model.network.max_positions)
    lost: dict[tuple[str, int], tuple[list[float], list[int]]] = {name: ([], []) for name in policies}
    for part in parts:
        reading = decode.read_full(model, batch.prompts(part, "agnostic", rows), context=context)
        for name, (spec, weights) in policies.items():
            done = batch.run(
                model, kvjax.policy(spec), part, protocol="agnostic", context=context, rows=rows,
                weights=weights, reading=reading,
            )  # fmt: skip
            for outcome in done.outcomes:
                lost[name][0].append(outcome.nll)
                lost[name][1].append(outcome.tokens)
    return lost


def compared(
    settings: Settings,
    model: LanguageModel,
    layers: list[Params],
    slots: Sequence[int],
    counts: tuple[int, int, int],
) -> dict[str, Any]:
    """The study as JSON.

    Args:
      settings: of the rankers' run.
      model, layers: the model and its rankers.
      slots: cache sizes.
      counts: sequences by which heads are chosen, held-out rows of a kind, samples of a task.
    """
    heads = gate.measured(settings, model, layers, counts[0])
    chosen = choices(heads)
    agent = settings.agent
    policies = {
        (name, size): (
            f"kvp({agent.sinks}, recent={agent.recent}) + uniform({size})",
            {"eviction": gate.with_gate(layers, on)},
        )
        for size in slots
        for name, on in chosen.items()
    }
    sets, data = held_rows(settings, model, counts[1]), find()
    for name in TASKS:
        sets[name] = runner.draw(tasks.tasks()[name], model, data, length=LENGTH, seed=SEED, count=counts[2])
    lost = []
    for name, samples in sets.items():
        found = losses(model, samples, policies)
        for (criterion, size), (nats, tokens) in found.items():
            mean = stats.interval(nats, tokens)[0]
            less = stats.difference(nats, found["all ranked", size][0], tokens)
            at = {"set": name, "criterion": criterion, "slots": size, "n": len(nats)}
            lost.append(at | {"nats": mean, "less_all_ranked": less})
            print(f"{name} {size} {criterion}: {mean:.3f}", flush=True)
    off = {name: [f"{at}.{head}" for at, head in np.argwhere(~on)] for name, on in chosen.items()}
    return {"sequences": counts[0], "heads": heads, "by_chance": off, "lost": lost}


def page(tree: Mapping[str, Any], command: str) -> str:
    """Markdown: what each criterion leaves to chance, and the losses."""
    base, *others = tree["by_chance"]
    lost = {(x["set"], x["slots"], x["n"], x["criterion"]): x for x in tree["lost"]}
    lines = [
        [*cell, f"{lost[*cell, base]['nats']:.3f}", *(_change(lost[*cell, name]) for name in others)]
        for cell in dict.fromkeys(key[:3] for key in lost)
    ]
    entropy, cost, error = (np.asarray(tree["heads"][name]) for name in ("entropy", "cost", "error"))
    heads = [
        [f"{layer}.{head}", f"{entropy[layer, head]:.2f}", f"{2 * cost[layer, head]:.2f}", f"{ratio:.2f}"]
        for (layer, head), ratio in np.ndenumerate(error)
    ]
    off = "\n".join(_summary(name, heads, tree["lost"]) for name, heads in tree["by_chance"].items())
    losses = table.markdown(["set", "slots", "n", base, *others], lines)
    by_head = table.markdown(["head", "entropy", "cost / random", "output error / random"], heads)
    return f"""# Heads that are left to chance

    {command}

{off}

## Loss

Nats a token with all heads ranked, then the difference from that, with its interval; lower is better.
Held-out rows of the mixture by kind, then tasks of seed {SEED}; 1,024 tokens, question after compression.

{losses}

## By head

{tree["sequences"]} held-out sequences. Entropy of attention in nats; the trained cost, and the squared
error of the output after W_o, over those of a random choice.

{by_head}
"""


def _summary(name: str, heads: Sequence[str], lost: Sequence[Mapping[str, Any]]) -> str:
    changes = [(f"{x['set']} {x['slots']}", x["less_all_ranked"]) for x in lost if x["criterion"] == name]
    mean = float(np.mean([change[0] for _, change in changes]))
    worse = ", ".join(cell for cell, (_, low, _) in changes if low > 0) or "none"
    chance = ", ".join(heads) or "none"
    return f"* {name}: {chance}. Mean change {mean:+.3f}; worse by more than its interval: {worse}."


def _change(lost: Mapping[str, Any]) -> str:
    mean, low, high = lost["less_all_ranked"]
    return f"{mean:+.3f} ({low:+.3f} … {high:+.3f})"


def main(words: Sequence[str] | None = None) -> int:
    """Writes gates.json and gates.md; the exit code."""
    return cli.run(_run, words)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.kvp.gates", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="of the rankers")
    parser.add_argument("--file", type=Path, required=True, help="of rankers; their gates are passed over")
    parser.add_argument("--slots", type=cli.numbers(24), default=[64, 256], help="default: 64,256")
    parser.add_argument("--sequences", type=cli.whole(1), default=gate.SEQUENCES, help="default: 64")
    parser.add_argument("--rows", type=cli.whole(2), default=10, help="of each kind (default: 10)")
    parser.add_argument("--samples", type=cli.whole(2), default=20, help="of each task (default: 20)")
    cli.add(parser, "--out", default=Path("results/kvp"), help="default: results/kvp")
    values = vars(parser.parse_args(words))
    settings = read(values["config"])
    model = settings.model()
    layers = gate.bare(load_weights(values["file"], model).layers)
    counts = values["sequences"], values["rows"], values["samples"]
    tree = short({"study": "gates"} | versions() | compared(settings, model, layers, values["slots"], counts))
    values["out"].mkdir(parents=True, exist_ok=True)
    file = values["out"] / "gates.json"
    file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    command = f"python -m studies.kvp.gates --config {values['config']} --file {values['file']}"
    file.with_suffix(".md").write_text(page(json.loads(file.read_text()), command), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    cli.start(main)
