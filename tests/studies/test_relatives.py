"""The tables of results/relatives are what its rows give, and costs are measured of every method named."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from benchmarks import random_model
from kvjax.eval.measure.store import read
from kvjax.eval.report.table import Results
from kvjax.models.decoder import Decoder
from studies import cost, relatives

FOLDER = Path(__file__).parents[2] / "results" / "relatives"


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(tuple(read(FOLDER)))


def test_the_tables_are_those_of_the_rows(results, monkeypatch):
    text = (FOLDER / "tables.md").read_text(encoding="utf-8")
    assert relatives.scores(results, "dialogue_recall") in text
    for pair in (relatives.PAIRS[5], relatives.PAIRS[-1]):  # in both protocols, and on books
        monkeypatch.setattr(relatives, "PAIRS", (pair,))
        lines = relatives.pairs(results).splitlines()[2:]
        assert lines
        assert all(line in text for line in lines)


def test_every_pair_has_rows(results):
    there = {row.cell.policy for row in results.rows}
    assert {policy for pair in relatives.PAIRS for policy in pair} <= there


def test_a_cost_is_of_the_prompt_the_steps_and_the_bytes():
    spec = random_model.TINY
    model = cost.Model(Decoder(spec), jax.tree.map(jnp.asarray, random_model.draw(spec, 0)))
    one = cost.cost(model, cost.BESIDE, 96)
    assert one["prompt"] > 0
    assert one["step"] > 0
    whole = cost.cost(model, "full", 96)
    assert one["held"] < whole["held"]
    text = cost.page([(cost.BESIDE, one), ("full", whole)], 96)
    assert "| 1.00 |" in text
    assert all(kvjax.policy(policy) for policy in cost.POLICIES)
