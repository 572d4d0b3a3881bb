"""Every notebook source runs from top to bottom."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    names = runpy.run_path(str(path))
    assert "kvjax" in names


def test_quickstart_recalls_the_needle() -> None:
    path = next(path for path in NOTEBOOKS if path.stem == "quickstart")
    rows = {spec: (answer, live) for spec, answer, live, _ in runpy.run_path(str(path))["rows"]}
    assert "48213" in rows["full"][0]
    assert rows["snapkv + uniform(0.25)"][1] < 0.5 * rows["full"][1]
