"""What each command does; only what a command needs is imported for it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvjax import decode
from kvjax.algebra import Policy
from kvjax.catalogue import policy as parse_policy
from kvjax.cli import check_alone
from kvjax.eval import arguments, tasks
from kvjax.eval.arguments import Asked
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import grid, runner
from kvjax.eval.measure.store import RESULTS, Store, about, read
from kvjax.eval.tasks.data import find
from kvjax.loading import EMBEDDED, LanguageModel, load
from kvjax.weights import chosen, is_auto, sources

Item = TypeVar("Item")

if TYPE_CHECKING:
    from kvjax.eval.report.table import Results


def do(words: Sequence[str]) -> None:
    """Reads the words and does what they say; results on standard output."""
    asked = arguments.parse(words)
    commands = {"run": _run, "tasks": _tasks, "report": _report, "claims": _claims, "match": _match}
    (commands | {"roundtrip": _roundtrip, "frontier": _frontier})[asked.what](asked)


def _tasks(asked: Asked) -> None:
    del asked
    for task in tasks.tasks().values():
        needs = f"  needs {', '.join(task.needs)}" if task.needs else ""
        print(f"{task.group:<10} {task.name:<18} from {task.fits:>5} tokens  {task.metric}{needs}")


def model_of(values: dict[str, Any]) -> LanguageModel:
    """The model an option names, with its tokenizer read.

    Raises:
      EvalError: files that cannot be read, or a tokenizer that is none.
      InputError: several processes, which would all write the results.
      ModelError: no such model, or one of another kind.
    """
    check_alone("python -m kvjax.eval", "kvjax.prefill and kvjax.generate")
    name = values["model"]
    try:
        model = load(None if name == EMBEDDED else name, dtype=values["dtype"], mesh=values["mesh"])
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
    model = (
        model_of(asked.values) if any(is_auto(spec) for job in asked.jobs for spec in job.policies) else None
    )
    given = [job.given or asked.values["weights"] for job in asked.jobs]
    for job in asked.jobs:
        wanted, absent = tasks.named(job.tasks, data)
        notes += [f"{task.name} needs {task.needs[0]}; left out." for task in absent]
        grids.append(
            grid.build(
                wanted,
                [_policy(spec, model, notes) for spec in job.policies],
                lengths=job.lengths,
                seeds=job.seeds,
                samples=job.samples,
                asked=job.protocols,
            )
        )
    model = model or model_of(asked.values)
    grids = [grid.with_weights(one, model, said) for one, said in zip(grids, given)]
    store = Store.open(asked.values["out"], about(model, data))
    for one in grids:
        notes += [f"{task} fits from {fits} tokens on; left out at {n}." for task, n, fits in one.skipped]
        notes += one.remarks
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    show = asked.values["progress"]
    runner.run(grid.joined(grids), model, data, store, say=lambda text: print(text, flush=True), shown=show)


def _policy(spec: str, model: LanguageModel | None, notes: list[str]) -> Policy:
    """The policy meant; what ``auto(...)`` stands for is noted."""
    if model is None or not is_auto(spec):
        return parse_policy(spec)
    policy, said = chosen(spec, model)
    notes.append(said)
    return policy


def _frontier(asked: Asked) -> None:
    from kvjax.eval import frontier
    from kvjax.eval.report import front

    values = asked.values
    plan, data, model = frontier.read(values["config"]), find(), model_of(values)
    whose, out = about(model, data), values["out"]
    store = Store.open(out, whose)
    results = frontier.run(
        plan,
        model,
        data,
        store,
        samples=values["samples"],
        last=values["stages"],
        say=lambda text: print(text, flush=True),
        shown=values["progress"],
    )
    dim, command = model.network.head_dim, f"python -m kvjax.eval frontier --config {values['config']}"
    said = front.needs(results, dim, plan.shares)
    text = f"# The front\n\n{said}\n\n{front.best_table(results, dim, plan.shares)}\n"
    (out / "front.md").write_text(text, encoding="utf-8")
    (out / "front.json").write_text(front.as_json(results, dim, whose, command), encoding="utf-8")
    for file in (front.draw(results, dim, out / "front.png"), out / "front.md", out / "front.json"):
        print(file)


def _results(folders: list[Path]) -> Results:
    from kvjax.eval.report.table import Results

    return Results(tuple(row for folder in folders for row in read(folder)))


def _report(asked: Asked) -> None:
    from kvjax.eval.report import figures, html, markdown

    folder = asked.values["folder"]
    results = _results([folder])
    if not results.rows:
        raise EvalError(f"{folder} has no finished cell yet. Let the run finish one first.")
    to = asked.values["to"] or folder
    to.mkdir(parents=True, exist_ok=True)
    pictures = figures.draw(results, to)
    for name, text in (("report.md", markdown.text(results)), ("report.html", html.page(results, pictures))):
        (to / name).write_text(text, encoding="utf-8")
        print(to / name)
    for file in pictures:
        print(file)


def _with_studies(folders: list[Path]) -> Results:
    """Rows, and what studies wrote; a folder may have either.

    Raises:
      EvalError: a folder that has neither.
    """
    from kvjax.eval.report.table import Results

    rows, found = [], []
    for folder in folders:
        here = []
        for file in sorted(folder.glob("*.json")):
            tree = json.loads(file.read_text(encoding="utf-8"))
            here += [tree] if isinstance(tree, dict) and "study" in tree else []
        found += here
        if not here or (folder / RESULTS).exists():
            rows += read(folder)
    return Results(tuple(rows), tuple(found))


def _claims(asked: Asked) -> None:
    from kvjax.eval.report import claims

    results = _with_studies(asked.values["folder"])
    print(claims.json_lines(results) if asked.values["json"] else claims.markdown(results))


def _match(asked: Asked) -> None:
    from kvjax.eval.measure import match

    values = asked.values
    data, like = find(), parse_policy(values["like"])
    task, length = _one(tasks.named(values["task"], data)[0], "--task"), _one(values["lengths"], "--lengths")
    model = model_of(values)
    samples = runner.draw(task, model, data, length=length, seed=0, count=values["samples"])
    both = like, parse_policy(values["policy"].replace("{}", str(length)))
    mine, theirs = (sources(one, values["weights"], others=both) for one in both)
    target = match.measured(model, like, samples, length=length, weights=mine)
    found = match.matched(model, values["policy"], target.live, samples, length=length, weights=theirs)
    for name, held, off in ((repr(like), target, 0.0), (found.policy, found.held, found.off)):
        sizes = {size: round(value) for size, value in dataclasses.asdict(held).items()}
        print(json.dumps({"policy": name, **sizes, "off": round(off, 5)}))


def _roundtrip(asked: Asked) -> None:
    from kvjax.eval.measure import roundtrip

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
    what = {"study": "roundtrip", "task": task.name, "rows": rows, "tokens": tokens, "page": decode.PAGE}
    print(json.dumps({**about(model, data), **what, "errors": roundtrip.as_json(found)}, indent=1))


def _one(values: list[Item], flag: str) -> Item:
    if len(values) != 1:
        raise EvalError(f"This command takes one of {flag}, and was given {len(values)}. Name a single one.")
    return values[0]
