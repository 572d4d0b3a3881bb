"""What write gates buy on a slice and on a pod of TPUs, on paper.

Each question is put to ``kvjax.plan``: the steps are compiled for the chips, not run. How many rows fit where
heads are filled unevenly is added up from the same programs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax import cli
from kvjax.plan import _arguments as arguments
from kvjax.plan import _estimate as estimate
from kvjax.plan import _plan as plans
from kvjax.plan import _report as report

_MODEL = "--model llama-3.1-8b --context 131072"
_GATES = "--policy wg-kv --share 0.25"

QUESTIONS = {
    "v5e-16-full": f"{_MODEL} --policy full --rows 12 --tpu v5e:4x4 --mesh data=2,tensor=8",
    "v5e-16-wg-kv": f"{_MODEL} {_GATES} --rows 12 --tpu v5e:4x4 --mesh data=2,tensor=8",
    "v5e-256-full": f"{_MODEL} --policy full --rows 192 --tpu v5e:16x16 --mesh data=32,tensor=8",
    "v5e-256-wg-kv": f"{_MODEL} {_GATES} --rows 192 --tpu v5e:16x16 --mesh data=32,tensor=8",
}
"""The name of a file to the words of a question; of each slice the full cache comes first."""

_LARGER = "--model llama-3.1-70b --context 131072 --policy wg-kv --share 0.25 --rows 16"

ALONE = {
    "v5e-64-70b": f"{_LARGER} --tpu v5e:8x8",
    "h200-8-70b": f"{_LARGER} --gpu h200:8",
}
"""Questions about a larger model, each by itself; the mesh is left to the plan."""

_ALL = QUESTIONS | ALONE

IMBALANCES = (1.0, 1.5)
"""Slots of the fullest device over the mean."""

_HEAD = """\
# Plans on paper

Llama-3.1-8B in bfloat16, every row at {context:,} tokens, write gates that admit 25 %. Steps and prefill were
compiled for the chips ahead of time ({wheels}); nothing here ran on a TPU, nothing is measured. Made by

    python -m studies.plan --out results/plan

Each `.json` is one plan, with the `command` that prints it. Imbalance: slots of the fullest device over the
mean; all devices have pools of the fullest one's size. Most rows are those of a decode step in the
{memory:.2f} GiB of a device. The least time of a step is the bytes that must be loaded over the published
bandwidth of the chip, and the bytes sent over that of its links; latencies are not counted. "As compiled"
counts whole pools, which reads of `xla` walk.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.plan", description=__doc__)
    cli.add(parser, "--out", required=True)
    parser.add_argument("--only", metavar="NAME", choices=_ALL, help=f"one of {', '.join(_ALL)}")
    values = parser.parse_args(argv)
    values.out.mkdir(parents=True, exist_ok=True)
    for name in [values.only] if values.only else _ALL:
        answer = answered(_ALL[name])
        (values.out / f"{name}.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {answer['at_imbalance']}", flush=True)
    (values.out / "README.md").write_text(page(read(values.out)), encoding="utf-8")


def answered(words: str) -> dict[str, Any]:
    """A plan as JSON, with what fits at each imbalance."""
    question = arguments.parse(words.split())
    began = time.process_time()
    plan = plans.answer(question)
    took = time.process_time() - began
    memory, step = question.chip.memory, plan.step
    columns = {}
    for imbalance in IMBALANCES:
        case = dataclasses.replace(step.case, imbalance=imbalance)
        rows = estimate.most_rows(case, step, memory)
        full = dataclasses.replace(case, rows=rows)
        columns[f"{imbalance:g}"] = {
            "most_rows": rows,
            "step": dataclasses.asdict(estimate.roofline(case, step, question.chip)),
            "step_of_most_rows": dataclasses.asdict(estimate.roofline(full, step, question.chip)),
        }
    command = {"command": f"python -m kvjax.plan {words}"}
    measured = {"processor_seconds": round(took, 1), "at_imbalance": columns}
    return command | report.as_json(question, plan) | measured


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The plans in a folder, by name."""
    files = {name: folder / f"{name}.json" for name in _ALL}
    return {name: json.loads(x.read_text(encoding="utf-8")) for name, x in files.items() if x.is_file()}


def page(plans: dict[str, dict[str, Any]]) -> str:
    """The page about them: a table for each slice of which both are there."""
    first = next(iter(plans.values()))
    wheels = ", ".join(f"{name} {first['compilers'][name]}" for name in ("jax", "libtpu"))
    head = _HEAD.format(context=first["context"], wheels=wheels, memory=first["memory"] / 2**30)
    names = list(QUESTIONS)
    pairs = [pair for pair in zip(names[::2], names[1::2]) if set(pair) <= set(plans)]
    slices = [(plans[full], plans[gated]) for full, gated in pairs]
    tables = [line for full, gated in slices for line in _table(full, gated)]
    return "\n".join([head, *tables, *_larger([plans[name] for name in ALONE if name in plans])])


def _larger(plans: list[dict[str, Any]]) -> list[str]:
    """A line for each plan of the larger model."""
    if not plans:
        return []
    lines = [
        "## Llama-3.1-70B",
        "",
        f"{plans[0]['rows']} rows of {plans[0]['context']:,} tokens under `{plans[0]['policy']}` at "
        f"{100 * plans[0]['share']:.0f} %, on the grid with the fewest bytes a device. Two small depths are "
        "compiled and carried on to 80 layers; the last column is the processor time that the plan took.",
        "",
        "| devices | mesh | GiB a device, of | weights | KV | least step | sent a step | most rows "
        "| read at once | plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for plan in plans:
        step, gib = plan["step"], 2**30
        sent = sum(one["sent"] for one in plan["collectives"])
        lines.append(
            f"| `{plan['devices']}` | {plan['mesh']} | {step['total'] / gib:.2f}, {plan['memory'] / gib:.2f} "
            f"| {step['weights'] / gib:.2f} | {step['allocated'] / gib:.2f} "
            f"| {1e3 * plan['roofline']['seconds']:.2f} ms | {sent / 1e6:.2f} MB | {plan['most_rows']} "
            f"| {plan['most_rows_read_at_once']} | {plan['processor_seconds']:.0f} s |"
        )
    return [*lines, "", *(f"    {plan['command']}" for plan in plans), ""]


def _table(full: dict[str, Any], gated: dict[str, Any]) -> list[str]:
    """The full cache beside write gates on one slice."""
    rows = full["rows"]
    lines = [
        f"## {full['devices']}, {full['mesh']}",
        "",
        f"| | imbalance | most rows | of `full` | least step of {rows} rows | | as compiled | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = full["at_imbalance"]["1"]
    for plan, imbalance in ((full, "1"), *((gated, f"{x:g}") for x in IMBALANCES)):
        column = plan["at_imbalance"][imbalance]
        times = [column["most_rows"] / base["most_rows"]]
        times += [base["step"][name] / column["step"][name] for name in ("seconds", "compiled_seconds")]
        lines.append(
            f"| `{plan['policy']}` | {imbalance} | {column['most_rows']} | {times[0]:.2f} x "
            f"| {1e3 * column['step']['seconds']:.2f} ms | {times[1]:.2f} x faster "
            f"| {1e3 * column['step']['compiled_seconds']:.2f} ms | {times[2]:.2f} x faster |"
        )
    sent = sum(one["sent"] for one in gated["collectives"])
    counts = ", ".join(
        f"{one['count']} {one['kind']} of {one['nbytes']:,} bytes among {one['devices']}"
        for one in gated["collectives"]
    )
    held = " and ".join(
        f"{plan['step']['total'] / 2**30:.2f} GiB ({plan['step']['weights'] / 2**30:.2f} weights, "
        f"{plan['step']['allocated'] / 2**30:.2f} KV)"
        for plan in (full, gated)
    )
    return [
        *lines,
        "",
        f"A device holds {held} at {rows} rows. A step of {rows} rows under the gates has {counts}: "
        f"{sent / 1e6:.2f} MB sent a device.",
        "",
    ]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # devices of this machine are left alone
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot give back what is for other devices
    cli.start(main)
