"""Results as data: one JSON file a command holds a list of runs, of each command line the newest."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cli import InputError

Row = dict[str, Any]


def written_command(words: Sequence[str]) -> str:
    """The command line without folders of this machine: of the peers, of results and of the model."""
    shown: list[str] = []
    skip = False
    for word in words:
        name = word.partition("=")[0]
        if not skip and name in ("--peers", "--model"):
            shown += [name, "DIR"]
        elif not skip and name != "--out":
            shown.append(word)
        skip = word in ("--peers", "--model", "--out")
    return "python -m benchmarks " + shlex.join(shown)


def save(folder: Path, name: str, run: Row) -> Path:
    """Add a run to ``folder/name.json``; a run of the same command is replaced.

    Raises:
      InputError: the file exists and is not ours.
    """
    file = folder / f"{name}.json"
    runs = [old for old in read(file) if old["command"] != run["command"]] if file.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".part-{os.getpid()}")
    part.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)
    return file


def read(file: Path) -> list[Row]:
    """The runs of a file.

    Raises:
      InputError: no such file, or not one of ours.
    """
    try:
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
        _ = [run["command"] for run in runs]
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}). Run the benchmark with --out first."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file} is not a result of benchmarks. Name another folder with --out.") from None
    return runs


def cell(row: Row) -> str:
    """A row in one line."""
    head = f"{row['system']:<12} {row['config']:<24} {row['context']:>6} x{row['batch']} {row['dtype']:<9}"
    if "skipped" in row:
        return f"{head} skipped: {row['skipped']}"
    mib = f"live {row['live_bytes'] / 2**20:7.1f} MiB, allocated {row['allocated_bytes'] / 2**20:7.1f}"
    if "ttft_s" in row:
        grown = row["peak_rss_growth_bytes"]
        peak = "" if grown is None else f", process +{grown / 2**20:.0f} MiB"
        cpu = "" if row.get("cpu_s") is None else f" ({row['cpu_s']:.2f} s of CPU)"
        return f"{head} first token {row['ttft_s']:8.2f} s{cpu}  {mib}{peak}"
    share = f", policy work {row['policy_share']:.1%}" if "policy_share" in row else ""
    return f"{head} {row['tokens_per_s']:8.1f} tokens/s  {mib}{share}"


def line(ratio: Row) -> str:
    """A ratio in one line."""
    place = f"{ratio['context']:>6} x{ratio['batch']} {ratio['dtype']:<9}"
    head = f"{ratio['what']:<46} {place} {ratio['ratio']:7.3f}"
    if "aim" not in ratio:
        return head
    sign, verdict = "<=" if ratio["at_most"] else ">=", "met" if ratio["met"] else "MISSED"
    return f"{head}  aim {sign} {ratio['aim']}: {verdict}"
