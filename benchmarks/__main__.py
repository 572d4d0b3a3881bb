"""The commands ``python -m benchmarks``."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, machine, results
from benchmarks.journal import Journal
from benchmarks.results import Row
from kvjax import cli
from kvjax.cli import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      argv: the words after ``python -m benchmarks``; None reads them from the process.
    """
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> int:
    if list(words[:1]) == ["kernels"]:
        from benchmarks.kernels import __main__ as kernels

        return kernels.main(words[1:])
    name, options = arguments.parse(words)
    commands: dict[str, Callable[[Any, Sequence[str]], None]] = {
        "compile": _compile,
        "drafts": _drafts,
        "drafted": _drafted,
        "accepted": _accepted,
        "host": _host,
        "load": _load,
        "parity": _parity,
        "held": _held,
        "peers": _peers,
        "plot": _plot,
        "serve": _serve,
    }
    commands.get(name, _table)(options, words)
    return 0


def _host(options: arguments.Host, words: Sequence[str]) -> None:
    from benchmarks.host import host
    from kvjax.sharding.mesh import mesh

    devices = mesh(options.mesh)
    for spec in options.policies:
        print(json.dumps(host(options.layers, spec, options.repeats, devices)), flush=True)


def _compile(options: arguments.Compile, words: Sequence[str]) -> None:
    from benchmarks import compile as compiling

    rows = []
    for row in compiling.rows(options.depths, options.policies, options.threads, size=options.size):
        rows.append(row)
        print(json.dumps(row) if options.json else compiling.line(row), flush=True)
    if options.out:
        run = _header(words, options.threads) | {"date": _today(), "rows": rows}
        _save_with_page(options.out, "compile", run, compiling.page)


def _drafts(options: arguments.Drafts, words: Sequence[str]) -> None:
    from benchmarks import drafts
    from benchmarks.random_model import SIZES, STORED
    from kvjax.models import published

    sizes = {
        name: (SIZES.get(name) or published.spec(name), STORED.get(name, "bfloat16"))
        for name in options.models
    }
    cells = [(context, batch) for context in options.contexts for batch in options.batches]
    rows = []
    for row in drafts.rows(sizes, options.drafts, cells):
        rows.append(row)
        print(json.dumps(row) if options.json else drafts.line(row), flush=True)
    if options.out:
        print(results.save(options.out, "drafts", {"command": results.written_command(words), "rows": rows}))


def _drafted(options: arguments.Drafted, words: Sequence[str]) -> None:
    from benchmarks import drafted

    cells = [(context, batch) for context in options.contexts for batch in options.batches]
    how = {"most": options.most, "turns": options.rounds}
    found = drafted.rows(options.size, options.drafts, cells, options.accepted, **how)
    _said(options, words, "drafted", found, drafted.line)


def _accepted(options: arguments.Accepted, words: Sequence[str]) -> None:
    from benchmarks import accepted
    from kvjax.loading import load

    model = load()
    found = (
        row
        for context in options.contexts
        for row in accepted.rows(
            model,
            options.targets,
            options.drafts,
            options.tasks,
            length=context,
            temperatures=options.temperatures,
            count=options.count,
            tokens=options.new,
        )
    )
    _said(options, words, "accepted", found, accepted.line)


def _said(
    options: Any, words: Sequence[str], name: str, found: Iterable[Row], line: Callable[[Row], str]
) -> None:
    """Rows on standard output as they come, and saved with the machine."""
    rows = []
    for row in found:
        rows.append(row)
        print(json.dumps(row) if options.json else line(row), flush=True)
    if options.out:
        run = _header(words, os.cpu_count() or 1) | {"date": _today(), "rows": rows}
        print(results.save(options.out, name, run))


def _load(options: arguments.Load, words: Sequence[str]) -> None:
    from benchmarks import load

    rows = []
    for row in load.rows(options):
        rows.append(row)
        print(json.dumps(row) if options.json else load.line(row), flush=True)
    if options.out:
        model = {"size": options.size, "seed": options.seed}
        run = _header(words, options.threads) | {"date": _today(), "model": model, "rows": rows}
        _save_with_page(options.out, "load", run, load.page)


def _serve(options: arguments.Serve, words: Sequence[str]) -> None:
    from benchmarks.serve import serve

    rows: list[Row] = []
    begun = time.monotonic()

    def done(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    run = _header(words, options.threads) | {"date": _today()}
    serve(options, done)
    if options.out:
        run |= {"seconds": round(time.monotonic() - begun), "rows": rows}
        print(results.save(options.out, "serve", run))


def _parity(options: arguments.Parity, words: Sequence[str]) -> None:
    import numpy as np

    from benchmarks import parity

    unknown = [name for name in options.only if name not in parity.CASES]
    if unknown:
        raise InputError(
            f"parity --only {unknown[0]!r}: there is no such method. Choose of {[*parity.CASES]}."
        )
    only, rows, recorded = options.only or tuple(parity.CASES), [], {}
    if options.only:
        before = (options.out / "parity.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, before) if row["method"] not in only]
        recorded = dict(np.load(options.out / "kvpress.npz"))
    with tempfile.TemporaryDirectory() as home:
        subjects = [parity.subject(name, Path(home)) for name in (*parity.FAMILIES, "embedded")]
        answers = parity.ask(options.peers, subjects, Path(home), only)
        for row in parity.rows(subjects, answers, only):
            rows.append(row)
            print(json.dumps(row), flush=True)
        recorded |= parity.record(answers, only)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = parity.ordered(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (options.out / "parity.jsonl").write_text(lines, encoding="utf-8")
    np.savez_compressed(options.out / "kvpress.npz", **recorded)
    page = parity.page(rows, "python -m benchmarks parity --peers DIR")
    (options.out / "README.md").write_text(page, encoding="utf-8")
    print(options.out / "README.md")


def _held(options: arguments.Held, words: Sequence[str]) -> None:
    from benchmarks import held, parity

    cases = [case for case in held.METHODS.values() if case]
    with tempfile.TemporaryDirectory() as home:
        subject = held.subject(Path(home))
        answers: Mapping[str, Any] = {}
        if options.peers is not None:
            answers = parity.ask(options.peers, [subject], Path(home), cases, [held.REMOVED])
        rows = []
        for row in held.rows(subject, answers):
            rows.append(row)
            print(json.dumps(row), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "held.md"
    file.write_text(held.page(rows, results.written_command(words)), encoding="utf-8")
    print(file)


def _peers(options: arguments.Peers, words: Sequence[str]) -> None:
    from benchmarks import peers

    peers.make(options.make, options.pip)
    print(f"made; use it with --peers {options.make}", file=sys.stderr)


def _plot(options: arguments.Plot, words: Sequence[str]) -> None:
    from benchmarks import plot, summary

    folder = options.out or Path("results/bench")
    for file in (*plot.draw(folder), summary.write(folder)):
        print(file)


def _table(options: arguments.Table, words: Sequence[str]) -> None:
    """decode, prefill, profile: measure, print rows as they come, keep them, save them at the end."""
    from benchmarks import random_model

    bench = importlib.import_module(f"benchmarks.{options.table}")
    model: Row = {"size": options.size} if options.model is None else {"name": options.model.resolve().name}
    model |= {"seed": options.seed, "parameters": random_model.count(options.spec)}
    run = _header(words, options.threads) | {"model": model}
    if options.out and (options.out / f"{options.table}.json").exists():
        results.read(options.out / f"{options.table}.json")  # raises before an hour of work, not after it
    journal = Journal(options.out / f"{options.table}.part.jsonl" if options.out else None, dict(run))
    rows = [row for group in journal.groups for row in group]
    if rows:
        print(f"going on after {len(rows)} rows of an interrupted run", file=sys.stderr)
    have = {bench.cell(row) for row in rows}
    date, begun = _today(), time.monotonic()

    with (
        tempfile.TemporaryDirectory() as home,
        _progress(options.table, bench.work(options, have)) as (advance, show),
    ):
        folder = options.model or Path(home) / "model"
        if options.model is None:
            random_model.write(folder, options.spec, options.seed, random_model.STORED[options.size])

        def done(group: list[Row]) -> None:
            rows.extend(group)
            journal.add(group, time.monotonic() - begun)
            for row in group:
                show(json.dumps(row) if options.json else results.cell(row))

        bench.measure(options, folder, done, advance, have)
    run |= {"date": date, "seconds": round(journal.seconds + time.monotonic() - begun), "rows": rows}
    _conclude(options, run)
    journal.finish()


def _conclude(options: arguments.Table, run: Row) -> None:
    """Ratios, files, and an error if a row of ours was not measured.

    Raises:
      InputError: that row.
    """
    if options.table == "profile":  # a policy may need weights that were not given: no error
        from benchmarks import profile

        if options.out:
            _save_with_page(options.out, "profile", run, profile.page)
        return
    from benchmarks import ratios

    questions = ratios.questions(options.table, run["rows"], run["model"].get("size"))
    run["ratios"] = ratios.answer(questions, run["rows"])
    for ratio in run["ratios"]:
        print(json.dumps(ratio) if options.json else results.line(ratio), flush=True)
    if options.out:
        print(results.save(options.out, options.table, run))
    failed = [row for row in run["rows"] if row["system"] == "kvjax" and "skipped" in row]
    if failed:
        raise InputError(f"{failed[0]['config']} was not measured: {failed[0]['skipped']}.")


def _header(words: Sequence[str], threads: int) -> Row:
    return {"command": results.written_command(words), "machine": machine.facts(threads)}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def _save_with_page(folder: Path, name: str, run: Row, page: Callable[[Sequence[Row]], str]) -> None:
    file = results.save(folder, name, run)
    file.with_suffix(".md").write_text(page(results.read(file)), encoding="utf-8")
    print(file, file.with_suffix(".md"), sep="\n")


@contextlib.contextmanager
def _progress(name: str, work: float) -> Iterator[tuple[Callable[[float], object], Callable[[str], None]]]:
    """A bar on standard error: one function advances it, the other prints a line above it."""
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    hidden = not sys.stderr.isatty()
    with tqdm(desc=name, total=work, bar_format=form, file=sys.stderr, disable=hidden) as bar:

        def show(text: str) -> None:
            bar.write(text, file=sys.stdout)
            sys.stdout.flush()

        yield bar.update, show


if __name__ == "__main__":
    cli.start(main)
