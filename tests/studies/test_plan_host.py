"""The page of pages in host memory is what its rows give, and these are the cases that it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax.plan import _estimate as estimate
from studies import overlap, plan_host

FOLDER = Path(__file__).parents[2] / "results" / "plan" / "host"
HOST = Path(__file__).parents[2] / "results" / "host"


def test_the_page_is_that_of_the_rows():
    found = json.loads((FOLDER / "plan.json").read_text(encoding="utf-8"))
    assert plan_host.page(found, found["rows"]) == (FOLDER / "README.md").read_text(encoding="utf-8")
    policies = len(plan_host.POLICIES) * len(plan_host.CONTEXTS)
    assert len(found["rows"]) == len(plan_host.DEVICES) * policies
    for row in found["rows"]:
        assert row["copied"] == 0
        assert (row["host"] > 0) == ("host" in row["policy"])


@pytest.mark.parametrize("at", range(len(plan_host.POLICIES)))
def test_bytes_of_the_longest_context_are_those_of_its_shapes(at):
    rows = json.loads((FOLDER / "plan.json").read_text(encoding="utf-8"))["rows"]
    one = plan_host.case(plan_host.POLICIES[at], plan_host.CONTEXTS[-1], estimate.abstract(1, 1, 1))
    held = estimate.resident(one)
    (row,) = [
        row
        for row in rows
        if (row["chip"], row["context"], row["policy"]) == ("v6e", one.context, repr(one.policy))
    ]
    for name in ("weights", "allocated", "host", "index", "linked"):
        assert row[name] == getattr(held, name), name


def test_overlap_counts_what_both_choose():
    right = [[{1, 2}, {3, 4}] * overlap.ROWS]
    other = [[{1, 2}, {4, 9}] * overlap.ROWS]
    assert overlap.overlap(right, other) == {
        "chosen": 2.0,
        "overlap": 0.75,
        "first_layer": 0.75,
        "lowest_head": 0.5,
    }


def test_the_page_of_codes_is_that_of_its_rows():
    found = json.loads((HOST / "overlap.json").read_text(encoding="utf-8"))
    assert overlap.page(found["rows"]) == (HOST / "overlap.md").read_text(encoding="utf-8")
