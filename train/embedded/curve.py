"""Writes a run as data: command, changes of the config, tokens seen, curve and speed.

python -m train.embedded.curve --config configs/pretrain/embedded.yaml --set text.digits=3 --folder DIR \\
    --write FILE.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from train import loop
from train.embedded import data, pretrain
from train.embedded.setup import options, read

BESIDE = ("step", "level", *loop.CLOCK)


def tokens_of(mix: data.Mix, level: int, index: int) -> int:
    """Tokens of a batch, without drawing its rows."""
    chosen = mix.levels[level]
    length = data.row_length(np.random.default_rng((mix.seed, level, index)), chosen)
    return max(1, (chosen.tokens or mix.tokens) // length) * length


def curve(config: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The data of a run's log.

    Args:
      config: as it was run.
      records: the log's lines.

    Returns:
      steps, tokens, levels (first step of each), checks (their metrics and the tokens seen), training
      (losses by step, with the tokens seen), and tokens a second of wall clock and of processor time between
      log lines that follow each other in one process (median over lines of a level; checks are not in it).
    """
    levels = tuple(pretrain.make_level(level) for level in config["mix"]["levels"])
    mix = data.Mix(seed=config["seed"], tokens=config["mix"]["tokens"], levels=levels)
    losses = [r for r in records if "loss" in r]
    steps = max((r["step"] for r in records), default=0)
    at = np.zeros(steps, int)  # the level of each batch is that of the next line of the log
    for r in reversed(losses):
        at[: r["step"]] = r["level"]
    seen = np.cumsum([tokens_of(mix, int(level), i) for i, level in enumerate(at)]).tolist()
    metrics_of = lambda r: {k: round(v, 4) for k, v in r.items() if k not in BESIDE}  # noqa: E731
    position = lambda r: {"step": r["step"], "tokens": seen[r["step"] - 1], "level": r["level"]}  # noqa: E731
    return {
        "steps": steps,
        "tokens": seen[-1] if seen else 0,
        "levels": {str(int(level)): int(np.argmax(at == level)) + 1 for level in np.unique(at)},
        "checks": [position(r) | metrics_of(r) for r in records if "loss" not in r],
        "training": [position(r) | metrics_of(r) for r in losses],
        "speed": _speed(records, seen),
    }


def _speed(records: list[dict[str, Any]], seen: list[int]) -> dict[str, dict[str, float]]:
    rates: dict[str, list[tuple[float, float]]] = {}
    for a, b in zip(records, records[1:]):
        if "loss" in a and "loss" in b and b["user"] > a["user"]:
            tokens = seen[b["step"] - 1] - seen[a["step"] - 1]
            rates.setdefault(str(b["level"]), []).append(
                (tokens / max(b["time"] - a["time"], 1e-9), tokens / (b["user"] - a["user"]))
            )
    names = ("tokens_a_second", "tokens_a_user_second")
    return {
        level: dict(zip(names, (round(float(x), 1) for x in np.median(pairs, axis=0))))
        for level, pairs in rates.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.curve", description=__doc__.splitlines()[0]
    )
    options(parser)
    parser.add_argument("--write", type=Path, required=True, help="JSON file")
    parser.add_argument("--note", help="a sentence to keep with the data")
    args = parser.parse_args()
    config = read(args.config, args.set, args.folder)
    records = [json.loads(line) for line in (Path(config["folder"]) / "log.jsonl").read_text().splitlines()]
    words = ["python -m train.embedded.pretrain --config", str(args.config)]
    result = {
        "command": " ".join([*words, *(["--set", *args.set] if args.set else [])]),
        "note": args.note,
        **curve(config, records),
    }
    args.write.parent.mkdir(parents=True, exist_ok=True)
    args.write.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.write} holds {result['steps']} steps, {result['tokens']:,} tokens")


if __name__ == "__main__":
    main()
