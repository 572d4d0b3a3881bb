"""Rows for the tests of the command: the words that make a folder of them, and made-up ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LENGTH, SAMPLES = 384, 5
POLICIES = ("window(160)", "snapkv(8) + uniform(0.25)")


def words(model: Path, out: Path, *more: str) -> list[str]:
    given = ["run", "--task", "niah", "--model", str(model), "--lengths", str(LENGTH), "--out", str(out)]
    given += [word for policy in POLICIES for word in ("--policy", policy)]
    return [*given, "--samples", str(SAMPLES), "--protocol", "both", *more]


def row(policy: str, scores: list[float], live: float, *, told: bool = True, protocol: str = "either"):
    """What a judge looks at."""
    return {
        "cell": {
            "task": "niah",
            "length": 512,
            "policy": policy,
            "protocol": protocol,
            "seed": 0,
            "samples": 9,
        },
        "group": "niah",
        "metric": "accuracy",
        "informative": told,
        "score": float(np.mean(scores)),
        "kept_fraction": 0.25,
        "reads_per_step": live,
        "reads": {"slots": live, "summary": 0.0, "selector": 0.0},
        "bytes": {"live": live, "peak_live": live, "full": 100.0},
        "each": {
            "score": scores,
            "nll": [1 - s for s in scores],
            "tokens": [1] * len(scores),
            "live": [live] * len(scores),
        },
    }


GOOD, BAD = [1.0] * 40, [0.0, 1.0] * 20
