"""Trains φ maps on stored traces: distillation of a frozen model's attention scores, all heads at once.

python -m train.traces --config configs/phi/embedded.yaml                              the traces, once
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024                   again to go on
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024 --export FILE     its newest checkpoint
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024 --silence FILE    exported maps, in place
python -m train.phi --config ... --prompt 4096 --compile v5e:2x2                    memory a chip, without one

A run stopped at any step and started again goes on with the losses it would have had. --export writes
FILE.safetensors and the run's log (.jsonl). Where the config has a section silence, heads that φ does not
help are silent in what is exported (``train.phi.silence``); --silence does that to maps exported without it.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.models.hf import ModelError
from kvjax.policies import phi
from kvjax.types import Params
from kvjax.weights import WeightsError, load_weights, save_weights
from train import loop
from train.agents import AgentLayout, make_layout
from train.config import ConfigError
from train.phi import batches, dropped, silence
from train.phi.fit import fit
from train.phi.maps import folded, initial
from train.phi.objective import Task, objective, quality
from train.phi.settings import Settings, read
from train.ranker.optimizer import optimizer
from train.trace_file import About, Traces

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def first(settings: Settings, about: About) -> Params:
    """Untrained maps of A = L x K heads."""
    key, heads = jax.random.key(settings.base.seed), about.layers * about.kv_heads
    return initial(key, heads, about.heads // about.kv_heads, about.head_dim, settings.maps)


def by_layer(params: Params, about: About, prompt: int) -> list[Params]:
    """Maps as a policy takes them, a dict a layer."""
    length = {"length": np.asarray([prompt], np.float32)}
    split = {name: np.split(np.asarray(x), about.layers) for name, x in folded(params).items()}
    return [length | {name: parts[layer] for name, parts in split.items()} for layer in range(about.layers)]


def make_check(
    task: Task, traces: Traces, settings: Settings, folder: Path, layout: AgentLayout
) -> Callable[[Params, int, int], loop.Verdict]:
    """Errors of attention's output and overestimated mass (``quality``) over held-out sequences and heads."""
    measure = jax.jit(functools.partial(quality, task))

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        held = [layout.batch(one) for one in batches.held(traces, settings, folder)]
        parts = [layout.mesh.read(measure(params, one)) for one in held]
        found = {name: np.concatenate([p[name] for p in parts]).mean(axis=0) for name in parts[0]}
        metrics = {f"held_{name}": float(value.mean()) for name, value in found.items()}
        layers = found["completed"].reshape(traces.about.layers, -1).mean(axis=1)
        metrics |= {f"held_completed_layer_{i}": float(value) for i, value in enumerate(layers)}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def made_for(settings: Settings) -> dict[str, str]:
    """What a file of maps must be for."""
    stands_for = settings.target.policy or "the prompt's middle"
    return {"prompt": str(settings.prompt), "for": stands_for, "symmetric": str(settings.maps.symmetric)}


def load(settings: Settings, folder: Path) -> tuple[Traces, LanguageModel]:
    """The traces and the model they are of.

    Raises:
      ConfigError, ModelError: traces that are not there, damaged, too short, or of another model.
    """
    traces = Traces.open(folder)
    batches.usable(traces, settings)
    model = settings.base.model()
    traces.of(model, settings.base.source)
    return traces, model


def run(settings: Settings, folder: Path) -> loop.State:
    """Trains to the end of the plan, or goes on from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``load`` and ``dropped.prepare``.
    """
    traces, model = load(settings, folder)
    about, base = traces.about, settings.base
    layout = make_layout(base.devices, about.layers * about.kv_heads)
    verdicts = base.folder / dropped.FOLDER
    if settings.policy is not None:
        train, held = batches.usable(traces, settings)
        dropped.prepare(settings, traces, model, verdicts, [*train, *held])
    del model
    maps = first(settings, about)
    count = sum(leaf.size for leaf in jax.tree.leaves(maps))
    print(
        f"maps of {about.layers * about.kv_heads} KV heads and their query heads: {count:,} parameters, "
        f"{100 * count / about.parameters:.2f} % of the model's {about.parameters:,}",
        file=sys.stderr,
    )
    task = Task(loss=settings.loss, target=settings.target, prompt=settings.prompt, softcap=about.softcap)
    return loop.train(
        params=layout.put(maps, layout.gates(maps)),
        optimizer=optimizer(base.rate, base.plan.steps),
        loss=jax.tree_util.Partial(functools.partial(objective, task)),
        batches=lambda level: batches.batches(traces, settings, verdicts),
        folder=base.folder,
        plan=base.plan,
        check=make_check(task, traces, settings, verdicts, layout),
        layout=layout,
    )


def export(settings: Settings, folder: Path, file: Path) -> None:
    """Writes the newest checkpoint's maps and the log beside each other.

    Raises:
      ConfigError, ModelError: see ``load``; nothing trained.
    """
    traces, model = load(settings, folder)
    about, base, maps = traces.about, settings.base, settings.maps
    layout = make_layout(base.devices, about.layers * about.kv_heads)
    chosen = optimizer(base.rate, base.plan.steps)
    found = loop.latest(base.folder, first(settings, about), chosen, layout)
    if found is None:
        raise ConfigError(
            f"--export finds no checkpoint in {base.folder}. Train first: the same command without --export."
        )
    step, params = found
    target = settings.target
    notes: dict[str, Any] = made_for(settings)
    notes |= {"sinks": target.sinks, "tail": target.tail}
    notes |= {"temperature": settings.loss.temperature, "seed": base.seed, "step": step, "config": base.name}
    notes |= {"sequences": about.train, "text": str(about.data)}
    layers, said = by_layer(params, about, settings.prompt), dict[str, Any]()
    if settings.silence is not None:
        layers, said = silence.applied(settings, model, layers)
        notes |= silence.notes(said)
    save_weights(file, model, phi.Phi(maps.features), layers, notes=notes)
    shutil.copyfile(base.folder / "log.jsonl", file.with_suffix(".jsonl"))
    if said:
        note(file, said)
    print(f"{file} holds the maps of step {step}")


def note(file: Path, found: dict[str, Any]) -> None:
    """Adds a line to the log beside a file of maps."""
    with file.with_suffix(".jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(found) + "\n")


def silence_file(settings: Settings, file: Path) -> None:
    """Silences heads of exported maps, in place, and says so in its header and log.

    Raises:
      ConfigError, ModelError: no section silence; maps for another prompt or policy, or gone through already.
      WeightsError: no maps of this model.
    """
    if settings.silence is None:
        raise ConfigError(
            "--silence: the config has no section silence. Add it, as in configs/phi/embedded.yaml."
        )
    model = settings.base.model()
    found, mine = load_weights(file, model), made_for(settings)
    if (theirs := {name: found.notes.get(name) for name in mine}) != mine:
        raise ConfigError(
            f"--silence {file}: its maps are for {theirs}, the config says {mine}. Give its own config."
        )
    if "silent" in found.notes:
        raise ConfigError(
            f"--silence {file}: it went through this already (silent: {found.notes['silent']}). Export the "
            "maps again."
        )
    layers, said = silence.applied(settings, model, found.layers)
    save_weights(
        file, model, phi.Phi(settings.maps.features), layers, notes=found.notes | silence.notes(said)
    )
    note(file, said)
    print(f"{file} holds the maps with {len(said['silent'])} silent heads")


def main(words: list[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m train.phi", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--prompt", type=int, metavar="N", help="which of the config's prompt lengths")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the newest checkpoint's maps")
    parser.add_argument(
        "--silence", type=Path, metavar="FILE", help="no φ in heads of FILE that it does not help"
    )
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    args = parser.parse_args(words)
    try:
        settings = read(args.config, args.prompt)
        if args.compile is not None:
            return fit(settings, args.compile)
        if args.silence is not None:
            silence_file(settings, args.silence)
            return 0
        folder = args.traces or settings.base.recording.folder
        if args.export is not None:
            export(settings, folder, args.export)
        else:
            run(settings, folder)
    except (ConfigError, ModelError, WeightsError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
