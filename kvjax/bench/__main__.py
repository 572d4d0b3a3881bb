"""The commands: one place that reads the command line and turns every outcome into an exit code.

0 done; 2 bad input, one sentence on standard error; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.bench import arguments, machine, results
from kvjax.bench.arguments import Asked
from kvjax.bench.errors import BenchError
from kvjax.policy import PolicyError

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
      argv: the words after ``python -m kvjax.bench``; None reads them from the process.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        asked = arguments.parse(words)
        {"host": _host, "peers": _peers, "plot": _plot}.get(asked.what, _table)(asked, words)
    except (BenchError, PolicyError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _host(asked: Asked, words: list[str]) -> None:
    from kvjax.bench.host import host

    del words
    for spec in asked.host_policies:
        print(json.dumps(host(asked.layers, spec, asked.repeats)), flush=True)


def _peers(asked: Asked, words: list[str]) -> None:
    from kvjax.bench import peers

    del words
    assert asked.make is not None  # noqa: S101  (the parser requires it)
    peers.make(asked.make, asked.pip)
    print(f"made; use it with --peers {asked.make}", file=sys.stderr)


def _plot(asked: Asked, words: list[str]) -> None:
    from kvjax.bench import plot

    del words
    for file in plot.draw(asked.out or Path("results/bench")):
        print(file)


def _table(asked: Asked, words: list[str]) -> None:
    """decode, prefill, profile: measure, print rows as they come, save them."""
    from kvjax.bench import profile, weights

    settings = asked.settings
    assert settings is not None  # noqa: S101  (the parser made them)
    measure, ticks, closing = _job(asked)
    begun = datetime.datetime.now(datetime.UTC)
    rows: list[Row] = []

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        weights.write(folder, settings.spec, settings.seed)
        with _bar(asked.what, ticks) as (tick, say):

            def done(row: Row) -> None:
                rows.append(row)
                say(json.dumps(row) if asked.json else results.cell(row))

            measure(folder, done, tick)
    run = {
        "command": results.written_command(words),
        "date": begun.strftime("%Y-%m-%d"),
        "seconds": round((datetime.datetime.now(datetime.UTC) - begun).total_seconds()),
        "machine": machine.facts(settings.threads),
        "model": {"size": settings.size, "seed": settings.seed, "parameters": weights.count(settings.spec)},
        "rows": rows,
    }
    closing(run)
    if asked.out:
        file = results.save(asked.out, asked.what, run)
        print(file)
        if asked.what == "profile":
            page = file.with_suffix(".md")
            page.write_text(profile.page(results.read(file)), encoding="utf-8")
            print(page)


def _job(asked: Asked) -> tuple[Callable[..., None], int, Callable[[Row], None]]:
    """How to measure, how many ticks that takes, and what to do with the finished run."""
    from kvjax.bench import decode, prefill, profile, ratios

    settings = asked.settings
    assert settings is not None  # noqa: S101
    if asked.what == "profile":
        return functools.partial(profile.measure, settings), profile.ticks(settings), lambda run: None
    module, questions = (decode, ratios.DECODE) if asked.what == "decode" else (prefill, ratios.PREFILL)

    def answered(run: Row) -> None:
        run["ratios"] = ratios.answer(questions, run["rows"])
        for ratio in run["ratios"]:
            print(json.dumps(ratio) if asked.json else results.line(ratio), flush=True)

    return functools.partial(module.measure, settings), module.ticks(settings), answered


class _bar:  # noqa: N801  (used as a verb: ``with _bar(...)``)
    """A bar on standard error; gives (tick, say), where say prints a line above it."""

    def __init__(self, what: str, ticks: int) -> None:
        from tqdm import tqdm

        self._line = tqdm(desc=what, total=ticks, file=sys.stderr, disable=not sys.stderr.isatty())

    def __enter__(self) -> tuple[Callable[[], None], Callable[[str], None]]:
        return lambda: (self._line.update(), None)[1], self._say

    def _say(self, text: str) -> None:
        self._line.write(text, file=sys.stdout)
        sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        self._line.close()


if __name__ == "__main__":
    sys.exit(main())
