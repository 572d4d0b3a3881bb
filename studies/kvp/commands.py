"""The studies of KVP; each writes JSON, a page about it and its picture.

costs   cost per budget by layer and head on held-out traces, and transfer between sorts of text
ablate  short equal runs that differ in one thing (a config's variants); trains what is not trained yet
time    ranking beside prefill, and FLOPs of full-size configs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvjax.eval.measure.row import short
from kvjax.eval.measure.store import versions
from kvjax.types import Params
from kvjax.weights import load_weights
from studies import processor
from studies.kvp import ablations, costs, pages, timing
from train.ranker import batches
from train.ranker.settings import read

LENGTHS = (1024, 2048, 8192, 16384, 32768)
"""At which FLOPs are counted."""


def do(study: str, values: dict[str, Any]) -> None:
    """Runs one study; the files it writes on standard output."""
    values["out"].mkdir(parents=True, exist_ok=True)
    result, page, draw = DO[study](values)
    file = values["out"] / f"{study}.json"
    file.write_text(json.dumps(short({"study": study} | versions() | result), indent=1) + "\n", "utf-8")
    file.with_suffix(".md").write_text(page(json.loads(file.read_text("utf-8"))), "utf-8")
    print(file)
    print(file.with_suffix(".md"))
    print(draw(json.loads(file.read_text("utf-8")), file.with_suffix(".png")))


Found = tuple[dict[str, Any], Callable[[Any], str], Callable[[Any, Path], Path]]
"""(the result, a function that writes its page, one that draws it)"""


def _costs(values: dict[str, Any]) -> Found:
    config, rankers = values["config"], _rankers(values)
    settings = read(config)
    traces = batches.Traces.open(settings.recording.folder)
    learned = {file.stem: costs.stacked(layers) for file, layers in rankers.items()}
    result = costs.as_json(costs.measured(traces, settings, learned))
    result |= {
        "rankers": list(learned),
        "model": traces.manifest.model,
        "fingerprint": traces.manifest.fingerprint,
    }
    variants = yaml.safe_load(config.read_text()).get("variants", {})
    sorts: dict[str, Sequence[str]] = {name: one["only"] for name, one in variants.items() if "only" in one}
    known = {kind for own in sorts.values() for kind in own}
    sorts |= {kind: [kind] for kind in result["kinds"] if kind not in known} | {"all": list(result["kinds"])}
    command = f"python -m studies.kvp costs --config {config} --rankers {' '.join(map(str, rankers))}"
    return result, lambda x: pages.costs_page(x, sorts, command), pages.draw_costs


def _rankers(values: dict[str, Any]) -> dict[Path, list[Params]]:
    model = read(values["config"]).model()
    return {file: load_weights(file, model).layers for file in values["rankers"]}


def _ablate(values: dict[str, Any]) -> Found:
    result = ablations.measured(values["config"], values["variants"])
    result["length"] = " and ".join(map(str, read(values["config"]).recording.lengths))
    chosen = f" --variants {','.join(values['variants'])}" if values["variants"] else ""
    command = f"python -m studies.kvp ablate --config {values['config']}{chosen}"
    return result, lambda x: pages.ablations_page(x, command), pages.draw_ablations


def _time(values: dict[str, Any]) -> Found:
    model = read(values["config"]).model()
    (file, layers), *_ = _rankers(values).items()
    parameters = timing.agent_parameters(layers[0])
    counted = [{"model": model.name, "rows": _flops(model.spec, parameters)}]
    for config in values["full_size"]:
        settings = read(config)
        assert settings.spec is not None  # full-size configs spell their model out
        width, hidden = (
            sum(1 if n in ("w_log", "w_linear") else settings.spec.head_dim for n in settings.agent.inputs),
            settings.agent.hidden,
        )
        one = hidden * (width + 2) + (settings.agent.layers - 2) * hidden * (hidden + 1)
        counted.append({"model": settings.name, "rows": _flops(settings.spec, one)})
    result = {
        "policy": timing.BUDGET,
        "repeats": processor.REPEATS,
        "agent_parameters": parameters,
        "measured": timing.measured(model, layers, values["lengths"]),
        "flops": counted,
    }
    full = " ".join(map(str, values["full_size"]))
    command = f"python -m studies.kvp time --config {values['config']} --rankers {file} --full-size {full}"
    return result, lambda x: pages.time_page(x, command), pages.draw_times


def _flops(spec: Any, parameters: int) -> list[dict[str, Any]]:
    return [{"length": n} | timing.flops(spec, parameters, n) for n in LENGTHS]


DO: dict[str, Callable[[dict[str, Any]], Found]] = {"costs": _costs, "ablate": _ablate, "time": _time}
