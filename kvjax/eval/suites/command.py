"""``python -m kvjax.eval run --suite``: read the rows, say what it takes, measure, write both layouts."""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.algebra import Policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import grid, runner
from kvjax.eval.measure.protocol import LONG
from kvjax.eval.measure.row import Cell
from kvjax.eval.measure.store import Store, about, read
from kvjax.eval.suites import cost, kvpress, measure, rows
from kvjax.eval.suites.suite import RATIOS, named
from kvjax.loading import EMBEDDED, LanguageModel, outline
from kvjax.sharding.mesh import axis_sizes
from kvjax.text import Text

FACTS = "suite.json"
"""In a folder of results: what was run, by whom, on which device."""


def run(
    values: dict[str, Any],
    load: Callable[[dict[str, Any]], LanguageModel],
    policy_of: Callable[[str], Policy],
) -> None:
    """Measures a suite.

    Args:
      values: the options of ``python -m kvjax.eval run``.
      load: gives the model that these name.
      policy_of: the policy of a word.

    Raises:
      EvalError: a suite that is unknown or cannot be read, a model that is too large, no policies.
    """
    suite = named(values["suite"])
    if values["protocol"] == "both":
        raise EvalError("--protocol both: a suite is measured under one. Run it twice, into the same --out.")
    if values["protocol"] == LONG:
        raise EvalError(f"--protocol {LONG}: a suite's answers are its model's own. Leave it out.")
    aware = values["protocol"] == "aware"
    specs = measure.spelled(values["policy"], values["ratios"] or RATIOS)
    policies = [policy_of(spec) for spec in specs]
    source, place = rows.read(suite, values["rows"], values["revision"])
    model, dtype = outline(None if values["model"] == EMBEDDED else values["model"], values["dtype"])
    text, model_spec = _text(model), model.spec
    chat = text.template is not None and not values["raw"]
    each, most = values["samples"], model_spec.max_positions
    drawn = measure.samples(suite, source, each, text, chat=chat, aware=aware, most=most)
    cells = measure.build(suite, drawn, policies, chat=chat, aware=aware)
    answers = {key: max(sample.max_new for sample, _ in own) for key, own in drawn.items()}
    on = cost.device(math.prod(axis_sizes(values["mesh"])[0]) if values["mesh"] else 1)
    how = {"on": on, "dtype": dtype, "weight_dtype": values["weight_dtype"]}
    plan = cost.plan(
        values["model"], model_spec, cells.policies, cells.cells, answers, **how, rates=cost.speed(dtype)
    )
    for line in (f"{suite.name}, {place}: {len(cells.cells)} cells", *cost.lines(plan, on, values["price"])):
        print(f"plan: {line}", file=sys.stderr)
    if values["dry_run"]:
        return
    model = load(values)
    cells = grid.with_weights(cells, model, values["weights"])
    for remark in dict.fromkeys(cells.remarks):
        print(f"note: {remark}", file=sys.stderr)
    data = measure.source(place)
    store = Store.open(values["out"], about(model, data))
    facts = {"suite": suite.name, "rows": place, "by": values["by"], "device": f"{on.count} x {on.kind}"}
    _keep(values["out"] / FACTS, facts | {"hours_planned": round(sum(plan.seconds) / 3600, 4)})
    say = lambda line: print(line, flush=True)  # noqa: E731
    runner.run(
        grid.joined([cells]),
        model,
        data,
        store,
        say=say,
        shown=values["progress"],
        most=lambda length: plan.rows[length],
    )
    _finish(values["out"], suite, source, cells.cells, on.kind, say)


def _finish(
    out: Path,
    suite: Any,
    source: Sequence[Any],
    cells: Sequence[Cell],
    device: str,
    say: Callable[[str], Any],
) -> None:
    """kvpress's layout of the cells of this run."""
    finished = {row.cell: row for row in read(out)}
    own = [finished[cell] for cell in cells if cell in finished]
    total = sum(cell.samples for cell in cells if cell.policy == repr(grid.FULL))
    for folder in kvpress.write(out / "kvpress", suite, source, own, total=total, device=device):
        say(f"{folder}: {json.dumps(json.loads((folder / 'metrics.json').read_text('utf-8')))}")


def _text(model: LanguageModel) -> Text:
    """The tokenizer.

    Raises:
      EvalError: none, or a damaged one.
    """
    try:
        return model.text
    except ValueError as error:
        raise EvalError(str(error)) from error


def _keep(file: Path, facts: dict[str, Any]) -> None:
    """Writes what was run, with the day; a run that goes on keeps the first day."""
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        facts = before | {key: value for key, value in facts.items() if value is not None}
    else:
        facts = {"day": datetime.date.today().isoformat()} | facts
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
