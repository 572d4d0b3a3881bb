"""Trains φ maps on stored traces: distillation of a frozen model's attention scores, all heads together.

python -m train.traces --config configs/phi/embedded.yaml                              the traces, once
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024                   trains, or continues
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024 --export FILE     its newest checkpoint
python -m train.phi --config configs/phi/embedded.yaml --prompt 1024 --silence FILE    exported maps, in place
python -m train.phi --config ... --prompt 4096 --compile v5e:2x2                       memory of a chip

A run that was stopped continues with exactly the losses it would have had. --export writes FILE.safetensors
and the run's log (.jsonl). If the config has a section silence, heads that φ does not help are silenced in
the exported maps (``train.phi.silence``); --silence does that to maps exported without it.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import cli
from kvjax.policies import phi
from kvjax.types import Params
from kvjax.weights import load_weights, save_weights
from train import loop
from train.agents import AgentLayout, make_layout
from train.config import ConfigError
from train.phi import batches, dropped, silence
from train.phi.aot import compile_for
from train.phi.maps import folded, initial
from train.phi.objective import Task, objective, quality
from train.phi.settings import Settings, read
from train.ranker.optimizer import optimizer
from train.settings import FileDtype, add_training_options
from train.trace_file import Manifest, Traces

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def initial_maps(settings: Settings, manifest: Manifest) -> Params:
    """Untrained maps of A = L x K heads."""
    key, heads = jax.random.key(settings.base.seed), manifest.layers * manifest.kv_heads
    return initial(key, heads, manifest.heads // manifest.kv_heads, manifest.head_dim, settings.maps)


def by_layer(params: Params, layers: int, prompt: int) -> list[Params]:
    """Maps as a policy takes them, a dict a layer."""
    length = {"length": np.asarray([prompt], np.float32)}
    split = {name: np.split(np.asarray(x), layers) for name, x in folded(params).items()}
    return [length | {name: parts[layer] for name, parts in split.items()} for layer in range(layers)]


def make_check(
    task: Task, traces: Traces, settings: Settings, folder: Path, layout: AgentLayout
) -> Callable[[Params, int, int], loop.Verdict]:
    """Means of ``quality`` over held-out sequences and heads."""
    measure = jax.jit(functools.partial(quality, task))

    def check(params: Params, step: int, level: int) -> loop.Verdict:
        held = [layout.batch(batch) for batch in batches.held(traces, settings, folder)]
        parts = [layout.mesh.read(measure(params, batch)) for batch in held]
        means = {name: np.concatenate([p[name] for p in parts]).mean(axis=0) for name in parts[0]}
        metrics = {f"held_{name}": float(mean.mean()) for name, mean in means.items()}
        layers = means["completed"].reshape(traces.manifest.layers, -1).mean(axis=1)
        metrics |= {f"held_completed_layer_{i}": float(value) for i, value in enumerate(layers)}
        return loop.Verdict(metrics=metrics, level=level)

    return check


def identifying_notes(settings: Settings) -> dict[str, str]:
    """The notes in a file of maps that must agree with the config."""
    target = settings.target.policy or "the prompt's middle"
    return {"prompt": str(settings.prompt), "for": target, "symmetric": str(settings.maps.symmetric)}


def load(settings: Settings, folder: Path) -> tuple[Traces, LanguageModel]:
    """The traces and their model.

    Raises:
      ConfigError, ModelError: traces that are missing, damaged, too short, or of another model.
    """
    traces = Traces.open(folder)
    batches.usable(traces, settings)
    model = settings.base.model()
    traces.check_model(model, settings.base.source)
    return traces, model


def run(settings: Settings, folder: Path) -> loop.State:
    """Trains to the end of the plan, or continues from the newest checkpoint.

    Raises:
      ConfigError, ModelError: see ``load`` and ``dropped.prepare``.
    """
    traces, model = load(settings, folder)
    manifest, base = traces.manifest, settings.base
    heads = manifest.layers * manifest.kv_heads
    layout = make_layout(base.devices, heads)
    dropped_folder = base.folder / dropped.FOLDER
    if settings.policy is not None:
        train, held = batches.usable(traces, settings)
        dropped.prepare(settings, traces, model, dropped_folder, [*train, *held])
    del model  # its memory is free while the maps train
    maps = initial_maps(settings, manifest)
    count = sum(leaf.size for leaf in jax.tree.leaves(maps))
    print(
        f"maps of {heads} KV heads and their query heads: {count:,} parameters, "
        f"{100 * count / manifest.parameters:.2f} % of the model's {manifest.parameters:,}",
        file=sys.stderr,
    )
    task = Task(loss=settings.loss, target=settings.target, prompt=settings.prompt, softcap=manifest.softcap)
    return loop.train(
        params=layout.put(maps, layout.gates(maps)),
        optimizer=optimizer(base.rate, base.plan.steps),
        loss=jax.tree_util.Partial(functools.partial(objective, task)),
        batches=lambda level: batches.batches(traces, settings, dropped_folder),
        folder=base.folder,
        plan=base.plan,
        check=make_check(task, traces, settings, dropped_folder, layout),
        layout=layout,
    )


def export(settings: Settings, folder: Path, file: Path, dtype: FileDtype = "float32") -> None:
    """Writes the newest checkpoint's maps, in that dtype, and the log.

    Raises:
      ConfigError, ModelError: see ``load``; no checkpoint.
    """
    traces, model = load(settings, folder)
    manifest, base, target = traces.manifest, settings.base, settings.target
    step, params = loop.latest(
        base.folder,
        initial_maps(settings, manifest),
        optimizer(base.rate, base.plan.steps),
        make_layout(base.devices, manifest.layers * manifest.kv_heads),
    )
    notes: dict[str, Any] = identifying_notes(settings)
    notes |= {"sinks": target.sinks, "tail": target.tail}
    notes |= {"temperature": settings.loss.temperature, "seed": base.seed, "step": step, "config": base.name}
    notes |= {"sequences": manifest.train, "text": str(manifest.data)}
    layers, record = by_layer(params, manifest.layers, settings.prompt), dict[str, Any]()
    if settings.silence is not None:
        layers, record = silence.applied(settings, model, layers)
        notes |= silence.notes(record)
    save_weights(file, model, phi.Phi(settings.maps.features), layers, notes=notes, dtype=dtype)
    shutil.copyfile(base.folder / "log.jsonl", file.with_suffix(".jsonl"))
    if record:
        append_to_log(file, record)
    print(f"{file} holds the maps of step {step}")


def append_to_log(file: Path, record: dict[str, Any]) -> None:
    """Adds a line to the log beside a file of maps."""
    with file.with_suffix(".jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")


def silence_file(settings: Settings, file: Path) -> None:
    """Silences heads of exported maps in place, and records it in the file's header and log.

    Raises:
      ConfigError, ModelError: no section silence; maps for another prompt or policy, or silenced already.
      WeightsError: no maps of this model.
    """
    if settings.silence is None:
        raise ConfigError(
            "--silence: the config has no section silence. Add it, as in configs/phi/embedded.yaml."
        )
    model = settings.base.model()
    maps, expected = load_weights(file, model), identifying_notes(settings)
    if (notes := {name: maps.notes.get(name) for name in expected}) != expected:
        raise ConfigError(
            f"--silence {file}: its maps are for {notes}, the config says {expected}. Give its own config."
        )
    if "silent" in maps.notes:
        raise ConfigError(
            f"--silence {file}: its heads are silenced already (silent: {maps.notes['silent']}). Export the "
            "maps again."
        )
    layers, record = silence.applied(settings, model, maps.layers)
    all_notes = maps.notes | silence.notes(record)
    save_weights(file, model, phi.Phi(settings.maps.features), layers, notes=all_notes)
    append_to_log(file, record)
    print(f"{file} holds the maps with {len(record['silent'])} silent heads")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; its exit code: 0, 2 for bad input."""
    return cli.run(_command, words)


def _command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.phi", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, metavar="N", help="which of the config's prompt lengths")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="instead of the config's traces.folder")
    parser.add_argument(
        "--silence", type=Path, metavar="FILE", help="no φ in heads of FILE that it does not help"
    )
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile the step for chips that are not here")
    add_training_options(parser)
    args = parser.parse_args(words)
    settings = read(args.config, args.prompt, args.model)
    folder = args.traces or settings.base.recording.folder
    if args.compile is not None:
        return compile_for(settings, args.compile)
    if args.silence is not None:
        silence_file(settings, args.silence)
    elif args.export is not None:
        export(settings, folder, args.export, args.export_dtype)
    else:
        run(settings, folder)
    return 0


if __name__ == "__main__":
    cli.start(main)
