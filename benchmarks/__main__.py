"""The commands ``python -m benchmarks``."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, machine, results
from benchmarks.arguments import Compile, Decode, Host, Peers, Plot, Serve
from benchmarks.journal import Journal
from kvjax import cli
from kvjax.cli import InputError

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      argv: the words after ``python -m benchmarks``; None reads them from the process.
    """
    return cli.run(_bench, argv)


def _bench(words: Sequence[str]) -> None:
    asked = arguments.parse(words)
    others: dict[str, Any] = {
        "compile": _compile,
        "host": _host,
        "peers": _peers,
        "plot": _plot,
        "serve": _serve,
    }
    others.get(asked.what, _table)(asked, words)


def _host(asked: Host, words: Sequence[str]) -> None:
    from benchmarks.host import host
    from kvjax.sharding.mesh import mesh

    del words
    on = mesh(asked.mesh)
    for spec in asked.policies:
        print(json.dumps(host(asked.layers, spec, asked.repeats, on)), flush=True)


def _compile(asked: Compile, words: Sequence[str]) -> None:
    from benchmarks import compile as compiling

    found = []
    for row in compiling.rows(asked.depths, asked.policies, asked.threads):
        found.append(row)
        print(json.dumps(row) if asked.json else compiling.line(row), flush=True)
    if asked.out:
        run = {
            "command": results.written_command(words),
            "machine": machine.facts(asked.threads),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "rows": found,
        }
        file = results.save(asked.out, "compile", run)
        page = file.with_suffix(".md")
        page.write_text(compiling.page(results.read(file)), encoding="utf-8")
        print(file, page, sep="\n")


def _serve(asked: Serve, words: Sequence[str]) -> None:
    from benchmarks.serve import serve

    rows: list[Row] = []
    begun = time.monotonic()

    def done(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    run: Row = {
        "command": results.written_command(words),
        "machine": machine.facts(asked.threads),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    serve(asked, done)
    if asked.out:
        run |= {"seconds": round(time.monotonic() - begun), "rows": rows}
        print(results.save(asked.out, "serve", run))


def _peers(asked: Peers, words: Sequence[str]) -> None:
    from benchmarks import peers

    del words
    peers.make(asked.make, asked.pip)
    print(f"made; use it with --peers {asked.make}", file=sys.stderr)


def _plot(asked: Plot, words: Sequence[str]) -> None:
    from benchmarks import plot, summary

    del words
    folder = asked.out or Path("results/bench")
    for file in (*plot.draw(folder), summary.write(folder)):
        print(file)


def _table(asked: Decode, words: Sequence[str]) -> None:
    """decode, prefill, profile: measure, print rows as they come, keep them, save them at the end."""
    from benchmarks import random_model

    settings, job = asked, _job(asked.what)
    run: Row = {
        "command": results.written_command(words),
        "machine": machine.facts(settings.threads),
        "model": {
            "size": settings.size,
            "seed": settings.seed,
            "parameters": random_model.count(settings.spec),
        },
    }
    if asked.out and (asked.out / f"{asked.what}.json").exists():
        results.read(asked.out / f"{asked.what}.json")  # raises before an hour of work, not after it
    journal = Journal(asked.out / f"{asked.what}.part.jsonl" if asked.out else None, dict(run))
    rows = [row for group in journal.groups for row in group]
    if rows:
        print(f"going on after {len(rows)} rows of an interrupted run", file=sys.stderr)
    have = {job.cell(row) for row in rows}
    date, begun = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), time.monotonic()

    with tempfile.TemporaryDirectory() as home, _bar(asked.what, job.work(settings, have)) as (tick, say):
        folder = Path(home) / "model"
        random_model.write(folder, settings.spec, settings.seed)

        def done(group: list[Row]) -> None:
            rows.extend(group)
            journal.add(group, time.monotonic() - begun)
            for row in group:
                say(json.dumps(row) if asked.json else results.cell(row))

        job.measure(settings, folder, done, tick, have)
    run |= {"date": date, "seconds": round(journal.seconds + time.monotonic() - begun), "rows": rows}
    _conclude(asked, run)
    journal.finish()


def _job(what: str) -> Any:
    """The module that measures: ``cell``, ``work``, ``measure``."""
    from benchmarks import decode, prefill, profile

    return {"decode": decode, "prefill": prefill, "profile": profile}[what]


def _conclude(asked: Decode, run: Row) -> None:
    """Ratios, files, and a word where a side of ours failed.

    Raises:
      InputError: a row of ours was not measured.
    """
    from benchmarks import profile, ratios

    if asked.what != "profile":
        run["ratios"] = ratios.answer(ratios.questions(asked.what, run["rows"]), run["rows"])
        for ratio in run["ratios"]:
            print(json.dumps(ratio) if asked.json else results.line(ratio), flush=True)
    if asked.out:
        file = results.save(asked.out, asked.what, run)
        print(file)
        if asked.what == "profile":
            page = file.with_suffix(".md")
            page.write_text(profile.page(results.read(file)), encoding="utf-8")
            print(page)
    failed = [row for row in run["rows"] if row["system"] == "kvjax" and "skipped" in row]
    if failed and asked.what != "profile":  # there a policy may want weights that were not given
        raise InputError(f"{failed[0]['config']} was not measured: {failed[0]['skipped']}.")


class _bar:  # noqa: N801  (used as a verb: ``with _bar(...)``)
    """A bar on standard error; gives (tick, say), where say prints a line above it."""

    def __init__(self, what: str, work: float) -> None:
        from tqdm import tqdm

        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
        self._line = tqdm(
            desc=what, total=work, bar_format=form, file=sys.stderr, disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> tuple[Callable[[float], None], Callable[[str], None]]:
        return self._tick, self._say

    def _tick(self, work: float) -> None:
        self._line.update(work)

    def _say(self, text: str) -> None:
        self._line.write(text, file=sys.stdout)
        sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        self._line.close()


if __name__ == "__main__":
    cli.start(main)
