"""What each command does; only what a command needs is imported for it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvjax.algebra import Policy
from kvjax.catalogue import policy as parse_policy
from kvjax.cli import check_alone
from kvjax.eval import arguments, tasks
from kvjax.eval.arguments import Command, Job
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import grid, runner
from kvjax.eval.measure.store import RESULTS, Store, about, read
from kvjax.eval.tasks.data import find
from kvjax.loading import EMBEDDED, LanguageModel, load
from kvjax.weights import chosen, is_auto, sources

Item = TypeVar("Item")


def do(words: Sequence[str]) -> None:
    """Runs the command that the words name; results on standard output."""
    command = arguments.parse(words)
    run = {"run": _run, "tasks": _tasks, "report": _report, "match": _match, "frontier": _frontier}
    run["leaderboard"] = _leaderboard
    run[command.what](command)


def _tasks(_: Command) -> None:
    for task in tasks.tasks().values():
        needs = f"  needs {', '.join(task.needs)}" if task.needs else ""
        print(f"{task.group:<10} {task.name:<18} from {task.fits:>5} tokens  {task.metric}{needs}")


def model_of(values: dict[str, Any]) -> LanguageModel:
    """The model an option names, with its tokenizer read.

    Raises:
      EvalError: files that cannot be read, or a tokenizer that is damaged.
      InputError: several processes, which would all write the results.
      ModelError: no such model, or one of an unknown kind.
    """
    check_alone("python -m kvjax.eval", "kvjax.prefill and kvjax.generate")
    name = values["model"]
    try:
        model = load(
            None if name == EMBEDDED else name,
            dtype=values["dtype"],
            mesh=values["mesh"],
            weight_dtype=values["weight_dtype"],
        )
    except OSError as error:
        raise EvalError(str(error)) from error
    try:
        _ = model.text
    except ValueError as error:  # no tokenizer, or a damaged one
        raise EvalError(str(error)) from error
    return model


def takes_turns(model: LanguageModel, values: dict[str, Any]) -> bool:
    """Are questions put through the model's chat template?"""
    return model.text.template is not None and not values["raw"]


def single(values: list[Item], flag: str) -> Item:
    """The only value of an option.

    Raises:
      EvalError: there are several.
    """
    if len(values) != 1:
        raise EvalError(f"This command takes one of {flag}, and was given {len(values)}. Name a single one.")
    return values[0]


def _run(command: Command) -> None:
    if command.values["suite"] is not None:
        from kvjax.eval.suites import command as suites

        suites.run(command.values, model_of, parse_policy)
        return
    data, values = find(), command.values
    grids: list[grid.Grid] = []
    notes: list[str] = []
    auto = any(is_auto(spec) for job in command.jobs for spec in job.policies)
    model = model_of(values) if auto else None
    jobs = [_solved(job, values["out"], notes) for job in command.jobs]
    jobs = [job for job in jobs if job.tasks]
    if not jobs:
        raise EvalError(" ".join(notes))
    for job in jobs:
        wanted, absent = tasks.named(job.tasks, data)
        notes += [f"{task.name} needs {task.needs[0]}; left out." for task in absent]
        policies = [_policy(spec, model, notes) for spec in job.policies]
        grids.append(
            grid.build(
                wanted,
                policies,
                lengths=job.lengths,
                seeds=job.seeds,
                samples=job.samples,
                protocol=job.protocols,
            )
        )
    model = model or model_of(values)
    if takes_turns(model, values):
        grids = [grid.as_turns(cells) for cells in grids]
    weights = [job.given or values["weights"] for job in jobs]
    grids = [grid.with_weights(cells, model, part) for cells, part in zip(grids, weights)]
    store = Store.open(values["out"], about(model, data))
    for cells in grids:
        notes += [f"{task} fits from {fits} tokens on; left out at {n}." for task, n, fits in cells.skipped]
        notes += cells.remarks
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    say = lambda text: print(text, flush=True)  # noqa: E731
    runner.run(grid.joined(grids), model, data, store, say=say, shown=values["progress"])


def _solved(job: Job, out: Path, notes: list[str]) -> Job:
    """The job with the first of its tasks that the full cache solves, if it asks for solved ones alone."""
    if job.solved is None:
        return job
    rows = read(out) if (out / RESULTS).is_file() else []
    full = [row for row in rows if row.cell.policy == repr(grid.FULL) and row.cell.length in job.lengths]
    solved = {row.cell.task for row in full if row.informative}
    chosen = [task for task in job.tasks if task in solved][: job.solved]
    named, which = (", ".join(names) for names in (job.tasks, chosen))
    notes.append(
        f"of {named} the full cache solves {len(solved & set(job.tasks))} in {out}; measured: "
        f"{which or 'none'}."
    )
    return dataclasses.replace(job, tasks=chosen)


def _policy(spec: str, model: LanguageModel | None, notes: list[str]) -> Policy:
    """The policy of a word; what ``auto(...)`` stands for is noted."""
    if model is None or not is_auto(spec):
        return parse_policy(spec)
    policy, note = chosen(spec, model)
    notes.append(note)
    return policy


def _frontier(command: Command) -> None:
    from kvjax.eval import frontier
    from kvjax.eval.report import front

    values = command.values
    config, data, model = frontier.read(values["config"]), find(), model_of(values)
    facts, out = about(model, data), values["out"]
    results = frontier.run(
        config,
        model,
        data,
        Store.open(out, facts),
        samples=values["samples"],
        last=values["stages"],
        chat=takes_turns(model, values),
        say=lambda text: print(text, flush=True),
        shown=values["progress"],
    )
    dim, words = model.network.head_dim, f"python -m kvjax.eval frontier --config {values['config']}"
    (out / "front.md").write_text(front.page(results, dim, config.shares, words), encoding="utf-8")
    (out / "front.json").write_text(front.as_json(results, dim, facts, words), encoding="utf-8")
    pictures = [front.draw(results, dim, out / "front.png")] if _can_draw() else []
    for file in (*pictures, out / "front.md", out / "front.json"):
        print(file)


def _report(command: Command) -> None:
    from kvjax.eval.report import figures, html, markdown
    from kvjax.eval.report.table import Results

    folder = command.values["folder"]
    results = Results(tuple(read(folder)))
    if not results.rows:
        raise EvalError(f"{folder} has no finished cell yet. Let the run finish one first.")
    to = command.values["to"] or folder
    to.mkdir(parents=True, exist_ok=True)
    pictures = figures.draw(results, to) if _can_draw() else []
    (to / "report.md").write_text(markdown.text(results), encoding="utf-8")
    (to / "report.html").write_text(html.page(results, pictures), encoding="utf-8")
    for file in (to / "report.md", to / "report.html", *pictures):
        print(file)


def _leaderboard(command: Command) -> None:
    from kvjax.eval.report import leaderboard

    folders = command.values["folders"]
    if missing := [folder for folder in folders if not (folder / RESULTS).is_file()]:
        raise EvalError(f"{missing[0]} has no {RESULTS}. Give folders that 'python -m kvjax.eval run' wrote.")
    print(leaderboard.write(folders, command.values["to"]))


def _can_draw() -> bool:
    """Is matplotlib there? Without it tables and pages are written all the same, and a note says so."""
    from kvjax.eval.report import plotting

    if plotting.available():
        return True
    print(f"note: written without pictures. {plotting.INSTALL}", file=sys.stderr)
    return False


def _match(command: Command) -> None:
    from kvjax.eval.measure import match

    values = command.values
    data, like = find(), parse_policy(values["like"])
    task, length = (
        single(tasks.named(values["task"], data)[0], "--task"),
        single(values["lengths"], "--lengths"),
    )
    model = model_of(values)
    samples = runner.draw(
        task,
        model,
        data,
        length=length,
        seed=0,
        count=values["samples"],
        chat=task.asks and takes_turns(model, values),
    )
    both = like, parse_policy(values["policy"].replace("{}", str(length)))
    weights = [sources(policy, values["weights"], others=both) for policy in both]
    target = match.measured(model, like, samples, length=length, weights=weights[0])
    best = match.matched(model, values["policy"], target.live, samples, length=length, weights=weights[1])
    for name, held, off in ((repr(like), target, 0.0), (best.policy, best.held, best.off)):
        sizes = {size: round(value) for size, value in dataclasses.asdict(held).items()}
        print(json.dumps({"policy": name, **sizes, "off": round(off, 5)}))
