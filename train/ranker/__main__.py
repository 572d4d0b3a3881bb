"""Trains KVP's rankers on stored traces: policy gradient over random rankings, all agents at once.

python -m train.traces --config configs/ranker/embedded.yaml                  the traces, once
python -m train.ranker --config configs/ranker/embedded.yaml                  trains, or continues
python -m train.ranker --config configs/ranker/embedded.yaml --export FILE    its newest checkpoint as a file
python -m train.ranker --config ... --compile v5e:2x4                         memory of a chip, without one

A run that was stopped continues with exactly the losses it would have had. --export writes
FILE.safetensors, the validation curve (.png, needs matplotlib) and the run's log (.jsonl).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import cli
from kvjax.policies import kvp
from kvjax.types import Params
from kvjax.weights import save_weights
from train import loop
from train.agents import AgentLayout, make_layout
from train.ranker import batches
from train.ranker.aot import compile_for
from train.ranker.objective import Statistics, Task, areas, folded, initial_agents, objective
from train.ranker.optimizer import gradient_statistics, optimizer
from train.ranker.settings import Settings, read
from train.settings import FileDtype, add_training_options
from train.trace_file import Manifest, Traces

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def by_layer(params: Params, manifest: Manifest) -> list[Params]:
    """Agents as a policy takes them, a dict a layer."""
    shape = manifest.layers, manifest.kv_heads
    split = {name: leaf.reshape(*shape, *leaf.shape[1:]) for name, leaf in params.items()}
    return [{name: leaf[layer] for name, leaf in split.items()} for layer in range(manifest.layers)]


def make_check(
    task: Task, statistics: Statistics, traces: Traces, settings: Settings, layout: AgentLayout
) -> Callable[[Params, int, int], loop.Verdict]:
    """Each agent's mean area on held-out sequences, divided by the oracle's; means over agents.

    Means are taken before the ratio, because the oracle's area may be almost 0 if few queries follow.
    """
    measure = jax.jit(functools.partial(areas, task, traces.manifest.layers))

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        held = [layout.batch(batch) for batch in batches.held(traces, settings)]
        parts = [layout.mesh.read(measure(statistics, params, batch)) for batch in held]
        # A cache shorter than their window has no privileged baselines.
        means = {
            name: np.concatenate([part[name] for part in parts if name in part]).mean(axis=0)
            for name in {name: None for part in parts for name in part}
        }
        ratios = {name: mean / means["oracle"] for name, mean in means.items() if name != "oracle"}
        metrics = {f"area_{name}": float(ratio.mean()) for name, ratio in ratios.items()}
        layers = ratios["learned"].reshape(traces.manifest.layers, -1).mean(axis=1)
        metrics |= {f"area_learned_layer_{layer}": float(value) for layer, value in enumerate(layers)}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def load(settings: Settings, folder: Path) -> tuple[Traces, LanguageModel]:
    """The traces and their model.

    Raises:
      ConfigError, ModelError: traces that are missing, damaged, too short, or of another model.
    """
    traces = Traces.open(folder)
    batches.check_traces(traces, settings)
    model = settings.model()
    traces.check_model(model, settings.source)
    return traces, model


def run(settings: Settings, folder: Path, *, checked: bool = True) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint; with or without checks.

    Raises:
      ConfigError, ModelError: see ``load``.
    """
    traces, _ = load(settings, folder)  # only the fingerprint of the model is needed
    manifest = traces.manifest
    number = manifest.layers * manifest.kv_heads
    layout = make_layout(settings.devices, number)
    agents = initial_agents(settings, number, manifest.head_dim)
    count = sum(leaf.size for leaf in jax.tree.leaves(agents))
    print(
        f"{number} agents of {count // number:,} parameters: {count:,} in all, "
        f"{100 * count / manifest.parameters:.2f} % of the model's {manifest.parameters:,}",
        file=sys.stderr,
    )
    task = Task(agent=settings.agent, method=settings.method, softcap=manifest.softcap)
    statistics = batches.statistics(traces, settings)
    statistics = layout.put(statistics, layout.gates(statistics))
    return loop.train(
        params=layout.put(agents, layout.gates(agents)),
        optimizer=optimizer(settings.rate, settings.plan.steps),
        loss=jax.tree_util.Partial(functools.partial(objective, task), statistics),
        batches=lambda level: batches.batches(traces, settings),
        folder=settings.folder,
        plan=settings.plan,
        check=make_check(task, statistics, traces, settings, layout) if checked else None,
        layout=layout,
        gradient_metrics=functools.partial(gradient_statistics, settings.rate.clip),
    )


def export(settings: Settings, folder: Path, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's agents, in that dtype, their validation curve and the log.

    Raises:
      ConfigError, ModelError: see ``load``; no checkpoint.
    """
    traces, model = load(settings, folder)
    agent = settings.agent
    step, params = newest_agents(settings, traces.manifest)
    layers = by_layer(folded(params, batches.statistics(traces, settings)), traces.manifest)
    notes: dict[str, Any] = {"inputs": " ".join(name.removeprefix("w_") for name in agent.inputs)}
    notes |= {"hidden": agent.hidden, "depth": agent.layers, "recent": agent.recent}
    notes |= {"trained": settings.method.kind, "seed": settings.seed, "step": step, "config": settings.name}
    text = traces.manifest.data | ({"only": list(settings.only)} if settings.only else {})
    notes |= {"sequences": len(batches.used(traces, settings, held=False)), "text": str(text)}
    part = kvp.LearnedRanker(agent.sinks, agent.recent)
    save_weights(file, model, part, layers, notes=notes, dtype=dtype)
    log = file.with_suffix(".jsonl")
    shutil.copyfile(settings.folder / "log.jsonl", log)
    print(f"{file} holds the rankers of step {step}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it (pip install -e '.[plot]') and export again.")
    else:
        draw_validation(log, file.with_suffix(".png"))


def newest_agents(settings: Settings, manifest: Manifest) -> tuple[int, Params]:
    """(step, agents) of the newest checkpoint.

    Raises:
      ConfigError: no checkpoint.
    """
    number = manifest.layers * manifest.kv_heads
    return loop.latest(
        settings.folder,
        initial_agents(settings, number, manifest.head_dim),
        optimizer(settings.rate, settings.plan.steps),
        make_layout(settings.devices, number),
    )


STYLES = {"learned": "-", "recency": "--", "knorm": ":", "random": "-."} | {
    "keydiff": (0, (5, 1)),
    "lagkv": (0, (1, 3)),
    "tova": (0, (8, 2, 1, 2)),
    "snapkv": (0, (8, 2, 1, 2, 1, 2)),
}
PRIVILEGED = ("tova", "snapkv")
"""They read the cache's last queries."""


def draw_validation(log: Path, path: Path) -> None:
    """The validation curve of a run: area under the cost curve over the oracle's, beside the baselines."""
    import matplotlib.pyplot as plt

    checks = [line for line in map(json.loads, log.read_text().splitlines()) if "area_learned" in line]
    steps = [line["step"] for line in checks]
    fig, ax = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
    for name, style in STYLES.items():
        if f"area_{name}" in checks[-1]:
            colour = "0.6" if name in PRIVILEGED else "0.2"
            values = [line.get(f"area_{name}", float("nan")) for line in checks]
            ax.plot(steps, values, linestyle=style, color=colour, label=name)
    ax.axhline(1, color="tab:red", lw=1, label="oracle")
    ax.set_xlabel("step")
    ax.set_ylabel("area under the cost curve / oracle's")
    fig.legend(loc="outside right upper", fontsize=8)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.ranker", description=__doc__.splitlines()[0])
    parser.add_argument("--variant", metavar="NAME", help="of the config's variants")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    add_training_options(parser)
    args = parser.parse_args(words)
    settings = read(args.config, args.model, args.variant)
    if args.compile is not None:
        return compile_for(settings, args.compile)
    folder = args.traces or settings.recording.folder
    if args.export is not None:
        export(settings, folder, args.export, args.export_dtype)
    else:
        run(settings, folder)
    return 0


if __name__ == "__main__":
    cli.start(main)
