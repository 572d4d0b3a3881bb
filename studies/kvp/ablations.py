"""Short equal runs that differ in one thing, all measured on the same held-out sequences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvjax.policies.kvp import INPUTS
from studies.kvp import costs
from train import loop
from train.agents import make_layout
from train.config import ConfigError
from train.ranker import __main__ as ranker
from train.ranker import batches
from train.ranker.objective import folded, initial_agents
from train.ranker.optimizer import optimizer
from train.ranker.settings import Settings, read

BASE = "base"


def variants(config: Path, only: Sequence[str] = ()) -> list[str]:
    """The config as it stands, and its variants; of them those that are named, where any are.

    Raises:
      ConfigError: names of none.
    """
    known = list(yaml.safe_load(config.read_text()).get("variants") or {})
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--variants {','.join(unknown)}: {config} has {', '.join(known) or 'none'}.")
    return [BASE, *(name for name in known if name in only or not only)]


def measured(config: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """Trains what is not trained yet; area over the oracle's of each run, and its processor time.

    Raises:
      ConfigError, ModelError: as ``train.ranker``.
    """
    chosen = {name: read(config, variant=None if name == BASE else name) for name in variants(config, only)}
    agents, seconds = {}, {}
    for name, settings in chosen.items():
        ranker.run(settings, settings.recording.folder, checked=False)
        agents[name], seconds[name] = trained(settings), processor(settings.folder / "log.jsonl")
        print(f"{name}: {settings.plan.steps} steps, {seconds[name]:.0f} s", flush=True)
    base = chosen[BASE]
    traces = batches.Traces.open(base.recording.folder)
    wide = dataclasses.replace(
        base.agent, inputs=tuple(n for n in INPUTS if n != "w_key_pre" or "pre" in traces.manifest.keys)
    )
    result = costs.measured(traces, dataclasses.replace(base, agent=wide), agents)
    areas = {name: x.mean(axis=(1, 2)) for name, x in result.areas.items()}  # of each sequence
    apart = {name: (x - areas[BASE]) / areas["oracle"].mean() for name, x in areas.items()}
    ratios = costs.over_oracle({name: x.mean(axis=0) for name, x in result.areas.items()})
    runs = [
        {
            "name": name,
            "seed": settings.seed,
            "agent": dataclasses.asdict(settings.agent),
            "method": dataclasses.asdict(settings.method),
            "peak": settings.rate.peak,
            "steps": settings.plan.steps,
            "processor_seconds": seconds[name],
            "area": float(ratios[name].mean()),
            "less_base": float(apart[name].mean()),
            "less_base_error": float(apart[name].std(ddof=1) / len(result.tasks) ** 0.5),
        }
        for name, settings in chosen.items()
    ]
    others = {name: float(x.mean()) for name, x in ratios.items() if name not in (*chosen, "oracle")}
    return {"sequences": len(result.tasks), "runs": runs, "untrained": others}


def trained(settings: Settings) -> Any:
    """The agents of a finished run on raw inputs, leaves [A, ...]."""
    traces = batches.Traces.open(settings.recording.folder)
    count = traces.manifest.layers * traces.manifest.kv_heads
    initial = initial_agents(settings, count, traces.manifest.head_dim)
    chosen, layout = optimizer(settings.rate, settings.plan.steps), make_layout(1, count)
    _, agents = loop.latest(settings.folder, initial, chosen, layout)
    return folded(agents, batches.statistics(traces, settings))


def processor(log: Path) -> float:
    """Seconds of processor time between the first and the last logged step."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return float(lines[-1]["user"] - lines[0]["user"])
