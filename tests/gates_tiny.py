"""A tiny gate run: a random two-layer model whose tokens are bytes, generated text, seconds on a CPU."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from train import loop

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "gate": {"hidden": 8, "window": 4, "tau": 0.1, "eps": 1e-6},
    "loss": {"cost": "window", "lambdas": {"default": 0.5, "none": 0.0}},
    "optimizer": {"peak": 0.05, "warmup": 0.1, "weight_decay": 0.01},
    "data": {"kind": "rows", "tokens": 256, "lengths": [64], "shares": [1], "needles": 0.0, "copies": 0.5},
    "mesh": {"data": 1, "tensor": 1},
    "plan": {"steps": 6, "log_every": 1, "check_every": 3, "save_every": 1},
    "check": {"lengths": [64], "rows": 4},
}


def config_at(folder: Path, model: Path, **sections: Any) -> dict[str, Any]:
    """The tiny config with its run in ``folder``; a section given as a dict is merged."""
    config = copy.deepcopy(CONFIG)
    config["folder"], config["model"] = str(folder / "run"), {"source": str(model), "dtype": "float32"}
    for name, section in sections.items():
        config[name] = config[name] | section if isinstance(section, dict) else section
    return config


def written(folder: Path, config: dict[str, Any]) -> Path:
    """The config as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def records(folder: Path, strength: str = "default") -> list[dict[str, Any]]:
    """The run's log without times."""
    lines = (folder / "run" / strength / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in loop.CLOCK} for line in lines]
