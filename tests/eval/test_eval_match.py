"""Budgets that hold the same bytes are searched for, and found within two percent."""

from __future__ import annotations

import json
import re

import pytest
from eval_rows import LENGTH

from kvjax.eval.__main__ import main
from kvjax.eval.measure import match

pytestmark = pytest.mark.usefixtures("no_pack")


@pytest.mark.parametrize(
    ("measure", "target", "first"),
    [
        (lambda n: 100 * n, 5000, 50),
        (lambda n: 100 * n + 4000, 9100, 91),
        (lambda n: 100 * max(n, 32) + 7 * n, 8000, 10),
        (lambda n: 64 * -(-n // 64) + 40 * n, 9000, 5),
        (lambda n: 3000 * n**0.5, 33000, 400),
    ],
)
def test_a_budget_is_found_within_two_percent(measure, target, first):
    tried = []
    tokens, size = match.search(lambda n: tried.append(n) or measure(n), target, first=first)
    assert abs(size / target - 1) <= match.TOLERANCE
    assert size == measure(tokens)
    assert len(tried) == len(set(tried)) <= match.TRIES


def test_a_budget_that_cannot_be_matched_is_the_nearest():
    tokens, size = match.search(lambda n: 1000.0 if n < 30 else 5000.0, 3000, first=7)
    assert size in (1000, 5000)
    assert tokens > 0


@pytest.mark.slow
def test_matched_policies_hold_the_same_bytes(tiny_folder, capsys):
    words = [
        "match",
        "--task",
        "niah",
        "--model",
        str(tiny_folder),
        "--lengths",
        str(LENGTH),
        "--samples",
        "3",
    ]
    assert main([*words, "--policy", "snapkv(8) + uniform({})", "--like", "window(160)"]) == 0
    like, best = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert like["policy"] == "window(160)"
    assert re.fullmatch(r"snapkv\(8\) \+ uniform\(\d+\)", best["policy"])
    assert abs(best["live"] / like["live"] - 1) <= 0.02
    assert best["allocated"] >= best["live"]
    assert best["peak_allocated"] > like["peak_allocated"]  # the whole prompt of a layer, once
