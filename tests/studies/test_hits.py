"""The study of the device's cache computes what the cache counts, and its files are those of its rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from kvjax import loading
from kvjax.cache import hosted as hosting
from studies import hits

FOLDER = Path(__file__).parents[2] / "results" / "host"


def chosen(steps: list[set[int]]) -> np.ndarray:
    return np.asarray([[unit in step for unit in range(6)] for step in steps])


@pytest.mark.parametrize(
    ("places", "expected"),
    [(2, [0, 1, 0, 1, 0]), (3, [0, 1, 0, 1, 1]), (4, [0, 1, 0, 2, 2])],
)
def test_a_cache_has_what_was_read_last(places, expected):
    # After each step two places hold 01, 12, 34, 14; three 01, 012, 234, 134; four 01, 012, 1234, 1234.
    steps = [{0, 1}, {1, 2}, {3, 4}, {4, 1}, {2, 3}]
    assert hits.found(chosen(steps), places).tolist() == expected


@pytest.mark.skipif(bool(hosting.absent()), reason=hosting.absent())
def test_what_is_computed_is_what_the_cache_counts(monkeypatch):
    """One unit a read, so that no two were read at the same time; the cache lets units go."""
    monkeypatch.setattr(hits, "STEPS", 24)
    monkeypatch.setattr(hits, "PAGE", tiny.PAGE)
    texts = [(tiny.prompt(n, n), tiny.prompt(new, 100 + n)) for n, new in ((90, 24), (71, 9))]
    rows = list(hits.measured(tiny.model(), ["quest(1, chunk=4, dense=0, recent=8)"], texts, 144))
    assert [row["places"] for row in rows] == [1, 2, 2, 4]
    assert rows[-1]["counted"] == rows[-1]["hits"]
    rates = [row["hits"] for row in rows]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] < 1
    assert all(row["low"] <= row["hits"] <= row["high"] and row["asked"] <= 1 for row in rows)


def test_the_page_and_the_plan_s_table_are_those_of_the_rows():
    rows = hits.read_rows(FOLDER)
    lines = [line for line in hits.page(rows).splitlines() if line.startswith("|")]
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(line in text for line in lines)
    shipped = json.loads((loading.embedded_folder() / "hits.json").read_text(encoding="utf-8"))
    assert shipped == hits.table(rows)
