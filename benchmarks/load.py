"""``load``: seconds and peak memory of reading a model, beside transformers, from one file and from shards.

Each row is a process of its own, with its libraries imported. The peak is what its resident memory grew by at
most, over the bytes of the weights in the dtype they are loaded in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers, random_model
from benchmarks.arguments import Load
from benchmarks.child import Child, ChildError
from benchmarks.results import Row
from benchmarks.sides import NO_PEERS

SHARDS = 5
"""The weights are also read from so many files or more."""


def rows(options: Load) -> Iterator[Row]:
    """A row for each dtype, number of files and side."""
    spec, stored = random_model.SIZES[options.size], random_model.STORED[options.size]
    whole = random_model.count(spec) * random_model.BYTES[stored]
    with tempfile.TemporaryDirectory() as home:
        folders = {}
        for name, limit in {"one": whole + 1, "shards": whole // SHARDS}.items():
            folders[name] = Path(home) / name
            random_model.write(folders[name], spec, options.seed, stored, max_shard_bytes=limit)
        for dtype in options.dtypes:
            weights = random_model.count(spec) * random_model.BYTES[dtype]
            for folder in folders.values():
                for system in ("kvjax", "transformers"):
                    row = {"system": system, "dtype": dtype, "stored": stored, "weights_bytes": weights}
                    row["files"] = len(list(folder.glob("*.safetensors")))
                    yield row | _measured(options, system, folder, dtype, weights)


def _measured(options: Load, system: str, folder: Path, dtype: str, weights: int) -> Row:
    if system == "kvjax":
        command = [sys.executable, "-m", "benchmarks.ours"]
    elif options.peers is None:
        return {"skipped": NO_PEERS}
    else:
        command = peers.command(options.peers)
    peaks, seconds = [], []
    try:
        for _ in range(options.rounds):
            with Child(command, options.threads) as child:
                before = child.ask("memory", forget=True)
                after = child.ask("load", folder=str(folder), dtype=dtype)
            seconds.append(round(after["seconds"], 2))
            peaks.append(after["peak_rss"] - before["rss"])
    except ChildError as error:
        return {"skipped": str(error)}
    peak = max(peaks)
    return {"seconds": seconds, "peak_bytes": peak, "over_weights": round(peak / weights, 3)} | {
        "versions": after["versions"]
    }


def line(row: Row) -> str:
    """A row in one line."""
    head = f"{row['system']:<12} {row['dtype']:<9} from {row['files']} files of {row['stored']}"
    if "skipped" in row:
        return f"{head} skipped: {row['skipped']}"
    return (
        f"{head} {min(row['seconds']):6.2f} s, peak {row['peak_bytes'] / 2**20:6.0f} MiB, "
        f"{row['over_weights']:.2f} x the weights"
    )
