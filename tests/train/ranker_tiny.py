"""A tiny ranker and its traces: a random two-layer model whose tokens are bytes, generated text, seconds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from train import loop, traces

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "traces": {
        "sequences": 10,
        "held": 3,
        "lengths": [48, 80],
        "shares": [1, 1],
        "shard": 4,
        "keys": ["post", "pre"],
        "dtype": "float32",
        "data": {"kind": "rows", "mix": {"ruler": 1, "books": 1}},
    },
    "agent": {"inputs": ["key", "value", "log"], "hidden": 16, "sinks": 2, "recent": 6},
    "method": {"permutations": 8, "rows": 4, "queries": 12, "least_future": 6},
    "optimizer": {"peak": 0.01, "warmup": 2},
    "plan": {"steps": 24, "log_every": 1, "check_every": 12, "save_every": 4},
}


def config_at(folder: Path, source: Path, config: dict[str, Any] = CONFIG, **sections: Any) -> Path:
    """A tiny config with its run in ``folder``, as a file; a section given as a dict is merged."""
    tree = copy.deepcopy(config)
    tree["folder"], tree["model"] = str(folder / "run"), {"source": str(source)}
    tree["traces"]["folder"] = str(folder / "traces")
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section if isinstance(section, dict) else section
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    """A run's log without times."""
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in loop.CLOCK} for line in lines]


@pytest.fixture(autouse=True)
def generated_text(monkeypatch):
    monkeypatch.setenv("KVJAX_DATA", "/nowhere")


def traced(home: Path, source: Path) -> Path:
    """The folder, with a config and its traces of a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVJAX_DATA", "/nowhere")
        assert traces.main(["--config", str(config_at(home, source))]) == 0
    return home
