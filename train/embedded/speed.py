"""Speed of a training step by row length, in tokens a second, with each of the two losses.

XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" nice -n 19 \\
    python -m train.embedded.speed --config configs/pretrain/embedded.yaml --write FILE.json

Both wall-clock and processor time are measured: with one thread, tokens a second of processor time are those
of an idle core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train import loop
from train.embedded import data, data_parallel, pretrain
from train.embedded.setup import initial_of, model_spec, options, read
from train.rows import ANSWER


def batch(config: dict[str, Any], length: int, tokens: int) -> dict[str, np.ndarray]:
    """Random ids in the shapes of a training batch."""
    rng, vocab = np.random.default_rng(0), config["model"]["vocab_size"]
    ids = rng.integers(3, vocab, (tokens // length, length)).astype(np.int32)
    weight = np.where(np.arange(length) % 64 > 60, ANSWER, 0.5) * np.ones((len(ids), 1))
    return {"tokens": ids, **data.choose_scored(rng, ids, weight, tokens // 4)}


def whole(config: dict[str, Any], length: int, tokens: int) -> dict[str, np.ndarray]:
    """A batch in as many parts as the config has devices."""
    count = config.get("devices", 1)
    part = batch(config, length, tokens // count)
    return part if count == 1 else {name: np.stack([leaf] * count) for name, leaf in part.items()}


def timed(
    config: dict[str, Any], loss: loop.Loss, rows: dict[str, np.ndarray], repeats: int
) -> dict[str, float]:
    """The fastest step in wall-clock and in processor time, and the compile time."""
    optimizer = pretrain.make_optimizer(config["optimizer"])
    params = jax.tree.map(jax.numpy.array, initial_of(config))
    state = loop.State(params=params, opt=optimizer.init(params))
    tokens, count, shardings = rows["tokens"].size, config.get("devices", 1), None
    if count > 1:
        where = data_parallel.make_layout(count)
        state, loss = where.settle(state), data_parallel.mean_loss(loss, where)
        shardings, rows = jax.tree.map(lambda leaf: leaf.sharding, state), where.batch(rows)
    step, partial = loop.make_step(optimizer, shardings), jax.tree_util.Partial(loss)
    took = []
    for _ in range(1 + repeats):
        user, wall = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
        state, _ = step(partial, state, rows)
        jax.block_until_ready(state)
        took.append((time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_utime - user))
    wall, user = np.min(took[1:], axis=0)
    return {
        "compiling_s": round(took[0][0], 2),
        "tokens_a_second": round(tokens / wall, 1),
        "tokens_a_user_second": round(tokens / user, 1),
    }


def measure(config: dict[str, Any], lengths: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Both losses at each length, with random weights and ids."""
    spec = model_spec(config["model"])
    losses = {
        "first": pretrain.make_loss(spec, config["model"]["dtype"]),
        "second": pretrain.make_quick_loss(spec),
    }
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(initial_of(config))),
        "tokens": tokens,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "nice": os.nice(0),
        "steps": {
            name: {str(n): timed(config, loss, whole(config, n, tokens), repeats) for n in lengths}
            for name, loss in losses.items()
        },
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.embedded.speed", description=__doc__.splitlines()[0]
    )
    options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="JSON file")
    args = parser.parse_args()
    result = measure(read(args.config, args.set, args.folder), args.lengths, args.tokens, args.repeats)
    print(json.dumps(result, indent=1))
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
