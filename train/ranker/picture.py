"""The validation curve of a run: area under the cost curve over the oracle's, beside what learns nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STYLES = {"learned": "-", "recency": "--", "knorm": ":", "random": "-."} | {
    "keydiff": (0, (5, 1)),
    "lagkv": (0, (1, 3)),
    "tova": (0, (8, 2, 1, 2)),
    "snapkv": (0, (8, 2, 1, 2, 1, 2)),
}
PRIVILEGED = ("tova", "snapkv")
"""They read the cache's last queries."""


def checks(log: Path) -> list[dict[str, Any]]:
    """A log's lines of checks."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if "area_learned" in line]


def curve(log: Path, path: Path) -> None:
    """Draws the checks of a log; the oracle is 1."""
    import matplotlib.pyplot as plt

    found = checks(log)
    steps = [line["step"] for line in found]
    fig, ax = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
    for name, style in STYLES.items():
        if f"area_{name}" in found[-1]:
            colour = "0.6" if name in PRIVILEGED else "0.2"
            of = [line.get(f"area_{name}", float("nan")) for line in found]
            ax.plot(steps, of, linestyle=style, color=colour, label=name)
    ax.axhline(1, color="tab:red", lw=1, label="oracle")
    ax.set_xlabel("step")
    ax.set_ylabel("area under the cost curve / oracle's")
    fig.legend(loc="outside right upper", fontsize=8)
    fig.savefig(path, dpi=100)
    plt.close(fig)
