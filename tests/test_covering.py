"""The default run takes a covering set of cases."""

from __future__ import annotations

from pathlib import Path

import covering

HERE = Path(__file__).parent


def test_cases_that_are_not_named_are_left_out(monkeypatch):
    monkeypatch.setattr(covering, "COVERING", {"a.py::test_x": ["1", "3"]})
    ids = [("a.py::test_x", "1"), ("a.py::test_x", "2"), ("b.py::test_x", "2"), ("a.py::test_x", "3")]
    assert covering.left_out(ids) == {1}
    assert covering.left_out([("a.py::test_x", "4"), ("a.py::test_x", "5")]) == set(), "other cases: all run"


def test_every_entry_names_a_test():
    for test, cases in covering.COVERING.items():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (HERE / file).read_text(), test
        assert cases, test
