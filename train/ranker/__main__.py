"""Trains KVP's rankers on stored traces: policy gradient over random rankings, all agents at once.

python -m train.traces --config configs/ranker/embedded.yaml                  the traces, once
python -m train.ranker --config configs/ranker/embedded.yaml                  again to go on
python -m train.ranker --config configs/ranker/embedded.yaml --export FILE    its newest checkpoint as a file
python -m train.ranker --config ... --compile v5e:2x4                      memory a chip, compiled without one

A run stopped at any step and started again goes on with the losses it would have had. --export writes
FILE.safetensors, the validation curve (.png, needs matplotlib) and the run's log (.jsonl).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.models.hf import ModelError
from kvjax.policies import kvp
from kvjax.types import Params
from kvjax.weights import save_weights
from train import loop
from train.agents import AgentLayout, make_layout
from train.config import ConfigError
from train.ranker import batches, picture
from train.ranker.agents import first
from train.ranker.fit import fit
from train.ranker.objective import Statistics, Task, areas, folded, objective
from train.ranker.optimizer import optimizer
from train.ranker.optimizer import statistics as gradients
from train.ranker.settings import Settings, read
from train.trace_file import About, Traces

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def by_layer(params: Params, about: About) -> list[Params]:
    """Agents as a policy takes them, a dict a layer."""
    split = lambda leaf, layer: leaf.reshape(about.layers, about.kv_heads, *leaf.shape[1:])[layer]  # noqa: E731
    return [{name: split(leaf, layer) for name, leaf in params.items()} for layer in range(about.layers)]


def make_check(
    task: Task, statistics: Statistics, traces: Traces, settings: Settings, layout: AgentLayout
) -> Callable[[Params, int, int], loop.Verdict]:
    """Each agent's mean area over held-out sequences over the oracle's, which is 1; means over agents.

    Means are taken before the ratio: where little future is left the oracle's area may be next to nothing.
    """
    measure = jax.jit(functools.partial(areas, task, traces.about.layers))

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        held = [layout.batch(one) for one in batches.held(traces, settings)]
        parts = [layout.mesh.read(measure(statistics, params, one)) for one in held]
        # A cache shorter than their window has no privileged baselines.
        found = {
            name: np.concatenate([part[name] for part in parts if name in part]).mean(axis=0)
            for name in {name: None for part in parts for name in part}
        }
        over = {name: value / found["oracle"] for name, value in found.items() if name != "oracle"}
        metrics = {f"area_{name}": float(value.mean()) for name, value in over.items()}
        layers = over["learned"].reshape(traces.about.layers, -1).mean(axis=1)
        metrics |= {f"area_learned_layer_{layer}": float(value) for layer, value in enumerate(layers)}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def load(settings: Settings, folder: Path) -> tuple[Traces, LanguageModel]:
    """The traces and the model they are of.

    Raises:
      ConfigError, ModelError: traces that are not there, damaged, too short, or of another model.
    """
    traces = Traces.open(folder)
    batches.check_traces(traces, settings)
    model = settings.model()
    traces.of(model, settings.source)
    return traces, model


def run(settings: Settings, folder: Path, *, checked: bool = True) -> loop.State:
    """Trains to the end of the plan, or goes on from the newest checkpoint; ``checked`` on the way or not.

    Raises:
      ConfigError, ModelError: see ``load``.
    """
    traces, _ = load(settings, folder)  # only the fingerprint of the model is needed
    about = traces.about
    layout = make_layout(settings.devices, about.layers * about.kv_heads)
    agents = first(settings, about.layers * about.kv_heads, about.head_dim)
    count = sum(leaf.size for leaf in jax.tree.leaves(agents))
    print(
        f"{about.layers * about.kv_heads} agents of {count // (about.layers * about.kv_heads):,} parameters: "
        f"{count:,} in all, {100 * count / about.parameters:.2f} % of the model's {about.parameters:,}",
        file=sys.stderr,
    )
    task = Task(agent=settings.agent, method=settings.method, softcap=about.softcap)
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
        watch=functools.partial(gradients, settings.rate.clip),
    )


def export(settings: Settings, folder: Path, file: Path) -> None:
    """Writes the newest checkpoint's agents, their validation curve and the log beside each other.

    Raises:
      ConfigError, ModelError: see ``load``; nothing trained.
    """
    traces, model = load(settings, folder)
    about, agent = traces.about, settings.agent
    layout = make_layout(settings.devices, about.layers * about.kv_heads)
    chosen = optimizer(settings.rate, settings.plan.steps)
    begun = first(settings, about.layers * about.kv_heads, about.head_dim)
    found = loop.latest(settings.folder, begun, chosen, layout)
    if found is None:
        raise ConfigError(
            f"--export finds no checkpoint in {settings.folder}. Train first: the same command without "
            "--export."
        )
    step, params = found
    layers = by_layer(folded(params, batches.statistics(traces, settings)), about)
    inputs = " ".join(name.removeprefix("w_") for name in agent.inputs)
    notes: dict[str, Any] = {
        "inputs": inputs,
        "hidden": agent.hidden,
        "depth": agent.layers,
        "recent": agent.recent,
    }
    notes |= {"trained": settings.method.kind, "seed": settings.seed, "step": step, "config": settings.name}
    text = about.data | ({"only": list(settings.only)} if settings.only else {})
    notes |= {"sequences": len(batches.used(traces, settings, held=False)), "text": str(text)}
    part = kvp.LearnedRanker(agent.sinks, agent.recent)
    save_weights(file, model, part, layers, notes=notes)
    log = file.with_suffix(".jsonl")
    shutil.copyfile(settings.folder / "log.jsonl", log)
    print(f"{file} holds the rankers of step {step}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it (pip install 'kvjax[plot]') and export again.")
    else:
        picture.curve(log, file.with_suffix(".png"))


def main(words: list[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.ranker", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--variant", metavar="NAME", help="of the config's variants")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the newest checkpoint's rankers")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    args = parser.parse_args(words)
    try:
        settings = read(args.config, variant=args.variant)
        if args.compile is not None:
            return fit(settings, args.compile)
        folder = args.traces or settings.recording.folder
        if args.export is not None:
            export(settings, folder, args.export)
        else:
            run(settings, folder)
    except (ConfigError, ModelError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
