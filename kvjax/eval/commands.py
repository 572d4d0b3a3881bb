"""What each command does; only what a command needs is imported for it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvjax import decode
from kvjax.catalogue import policy as parse_policy
from kvjax.eval import arguments, cells, runner, tasks
from kvjax.eval.arguments import Asked
from kvjax.eval.data import find
from kvjax.eval.errors import EvalError
from kvjax.eval.store import Store, about, read
from kvjax.loading import EMBEDDED, LanguageModel, load
from kvjax.weights import sources

Item = TypeVar("Item")

if TYPE_CHECKING:
    from kvjax.eval.table import Results


def do(words: Sequence[str]) -> None:
    """Reads the words and does what they say; results on standard output."""
    asked = arguments.parse(words)
    commands = {"run": _run, "tasks": _tasks, "report": _report, "claims": _claims, "match": _match}
    (commands | {"roundtrip": _roundtrip, "conf-kv": _conf_kv})[asked.what](asked)


def _tasks(asked: Asked) -> None:
    del asked
    for task in tasks.tasks().values():
        needs = f"  needs {', '.join(task.needs)}" if task.needs else ""
        print(f"{task.group:<10} {task.name:<18} from {task.fits:>5} tokens  {task.metric}{needs}")


def model_of(values: dict[str, Any]) -> LanguageModel:
    """The model an option names, with its tokenizer read.

    Raises:
      EvalError: files that cannot be read, or a tokenizer that is none.
      ModelError: no such model, or one of another kind.
    """
    name = values["model"]
    try:
        model = load(None if name == EMBEDDED else name, dtype=values["dtype"])
    except OSError as error:
        raise EvalError(str(error)) from error
    try:
        _ = model.text
    except ValueError as error:  # no tokenizer, or a damaged one
        raise EvalError(str(error)) from error
    return model


def _run(asked: Asked) -> None:
    data = find()
    grids, notes = [], []
    given = [job.given or asked.values["weights"] for job in asked.jobs]
    for job in asked.jobs:
        wanted, absent = tasks.named(job.tasks, data)
        notes += [f"{task.name} needs {task.needs[0]}; left out." for task in absent]
        grids.append(
            cells.plan(
                wanted,
                [parse_policy(spec) for spec in job.policies],
                lengths=job.lengths,
                seeds=job.seeds,
                samples=job.samples,
                asked=job.protocols,
            )
        )
    model = model_of(asked.values)
    grids = [cells.with_weights(grid, model, said) for grid, said in zip(grids, given)]
    store = Store.open(asked.values["out"], about(model, data))
    for grid in grids:
        notes += [f"{task} fits from {fits} tokens on; left out at {n}." for task, n, fits in grid.skipped]
        notes += grid.remarks
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    show = asked.values["progress"]
    runner.run(cells.joined(grids), model, data, store, say=lambda text: print(text, flush=True), shown=show)


def _results(folders: list[Path]) -> Results:
    from kvjax.eval.table import Results

    return Results(tuple(row for folder in folders for row in read(folder)))


def _report(asked: Asked) -> None:
    from kvjax.eval import figures, page, report

    folder = asked.values["folder"]
    results = _results([folder])
    if not results.rows:
        raise EvalError(f"{folder} has no finished cell yet. Let the run finish one first.")
    to = asked.values["to"] or folder
    to.mkdir(parents=True, exist_ok=True)
    pictures = figures.draw(results, to)
    for name, text in (("report.md", report.text(results)), ("report.html", page.page(results, pictures))):
        (to / name).write_text(text, encoding="utf-8")
        print(to / name)
    for file in pictures:
        print(file)


def _claims(asked: Asked) -> None:
    from kvjax.eval import claims

    results = _results(asked.values["folder"])
    print(claims.json_lines(results) if asked.values["json"] else claims.markdown(results))


def _match(asked: Asked) -> None:
    from kvjax.eval import match

    values = asked.values
    data, like = find(), parse_policy(values["like"])
    task, length = _one(tasks.named(values["task"], data)[0], "--task"), _one(values["lengths"], "--lengths")
    model = model_of(values)
    samples = runner.draw(task, model, data, length=length, seed=0, count=values["samples"])
    both = like, parse_policy(values["policy"].replace("{}", str(length)))
    mine, theirs = (sources(one, values["weights"], others=both) for one in both)
    target = match.held(model, like, samples, length=length, weights=mine)
    found = match.matched(model, values["policy"], target.live, samples, length=length, weights=theirs)
    for name, held, off in ((repr(like), target, 0.0), (found.policy, found.held, found.off)):
        sizes = {size: round(value) for size, value in dataclasses.asdict(held).items()}
        print(json.dumps({"policy": name, **sizes, "off": round(off, 5)}))


def _roundtrip(asked: Asked) -> None:
    from kvjax.eval import roundtrip

    values, data = asked.values, find()
    storages = [parse_policy(spec).storage for spec in values["policy"] or ("int8", "int4")]
    task, length = _one(tasks.named(values["task"], data)[0], "--task"), _one(values["lengths"], "--lengths")
    model = model_of(values)
    samples = runner.draw(task, model, data, length=length, seed=0, count=values["samples"])
    layers = roundtrip.exact(model, samples)
    found = roundtrip.errors(layers, storages)
    if not values["json"]:
        print(roundtrip.markdown(found))
        return
    rows, _, tokens, _ = layers[0][0].shape
    what = {"task": task.name, "rows": rows, "tokens": tokens, "page": decode.PAGE}
    print(json.dumps({**about(model, data), **what, "errors": roundtrip.as_json(found)}, indent=1))


def _conf_kv(asked: Asked) -> None:
    from kvjax.eval import conf_commands

    conf_commands.do(asked.values, model_of(asked.values), find())


def _one(values: list[Item], flag: str) -> Item:
    if len(values) != 1:
        raise EvalError(f"This command takes one of {flag}, and was given {len(values)}. Name a single one.")
    return values[0]
