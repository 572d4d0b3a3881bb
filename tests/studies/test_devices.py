"""Pages of devices: rows and contexts are the largest that fit, and the stored pages are those of today."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from kvjax import catalogue
from kvjax.eval import arguments
from kvjax.models import published
from kvjax.plan import _estimate, sizes
from kvjax.plan._deployment import Deployment
from pallas_kernels.measure.chips import CHIPS
from studies import devices

STORED = Path(__file__).parents[2] / "results" / "plan" / "devices"


def test_rows_are_the_most_that_fit_and_weights_the_widest():
    machine = devices.MACHINES["t4"]
    found = devices.fit(machine, "llama-3.1-8b")
    memory = CHIPS["t4"].memory
    assert found.weight_dtype == "int8"

    def need(rows, weight_dtype, policy="full", context=devices.CLASS, copies=devices.COPIES):
        case = sizes.deployment(
            published.spec("llama-3.1-8b"),
            policy,
            rows=rows,
            context=context,
            dtype="float16",
            weight_dtype=weight_dtype,
        )
        return sizes.need(case, copies).total

    assert need(1, None) > memory
    most = lambda rows: max(need(rows, "int8", policy) for policy in devices.POLICIES)  # noqa: E731
    assert most(found.rows) <= memory < most(found.rows + 1)
    assert need(1, "int8", context=found.longest[0], copies=1) <= memory
    assert need(1, "int8", context=found.longest[0] + 1024, copies=1) > memory


PLANS = sorted(path.stem for path in STORED.parent.glob("*.json"))


@pytest.mark.parametrize("name", PLANS)
def test_totals_are_near_those_of_compiled_plans(name):
    plan = json.loads((STORED.parent / f"{name}.json").read_text("utf-8"))
    axes = dict(word.split("=") for word in plan["mesh"].split(","))
    case = Deployment(
        spec=published.spec(plan["model"]),
        policy=catalogue.policy(plan["policy"]),
        mesh=_estimate.abstract(*(int(axes[axis]) for axis in ("data", "tensor", "context"))),
        rows=plan["rows"],
        context=plan["context"],
        share=plan["share"],
    )
    needed = sizes.need(case)
    assert needed.weights + needed.reading == pytest.approx(plan["prefill"]["total"], rel=0.05)
    assert needed.weights + needed.answering == pytest.approx(plan["step"]["total"], rel=0.05)
    # A step takes at least as long as the compiled one's bytes do.
    work = sizes.work(case)
    assert work.step_bytes == pytest.approx(plan["roofline"]["weights"] + plan["roofline"]["cache"], rel=0.01)


def test_more_memory_and_speed_are_never_worse():
    few = devices.fit(devices.MACHINES["v5e-1"], "llama-3.2-1b")
    more = devices.fit(devices.MACHINES["v6e-1"], "llama-3.2-1b")
    assert few.rows <= more.rows
    assert few.tokens < more.tokens
    assert few.hours > more.hours


def test_a_model_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(devices, "MODELS", ("llama-3.1-70b",))
    text = devices.page("t4")
    assert "| meta-llama/Llama-3.1-70B-Instruct | does not fit |" in text
    assert devices.NONE in text


@pytest.mark.parametrize("name", devices.MACHINES)
def test_stored_pages_have_a_command_that_parses(name):
    text = (STORED / f"{name}.md").read_text("utf-8")
    command = text.split("python -m kvjax.eval ")[1].split("\n\n")[0]
    parsed = arguments.parse(shlex.split(command.replace("\\\n", " ")))
    assert parsed.values["suite"] == "kvpress-ruler-4k"
    assert parsed.values["dry_run"]
    assert f"[{devices.MACHINES[name].title}]({name}.md)" in (STORED / "README.md").read_text("utf-8")


def test_a_stored_line_is_what_the_program_says():
    one = devices.fit(devices.MACHINES["l4"], "qwen2.5-0.5b")
    assert dataclasses.is_dataclass(one)
    line = f"| {one.rows} | {one.longest[0]:,}; {one.longest[1]:,} | {one.tokens:,.0f} | {one.hours:.1f} h |"
    assert line in (STORED / "l4.md").read_text("utf-8")
