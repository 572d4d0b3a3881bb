"""Which slow tests ``.ci/run BASE`` runs."""

from __future__ import annotations

from changed import package, slow_files

SLOW = "import pytest\nfrom kvjax.engine import Engine\n@pytest.mark.slow\ndef test_x(): ..."
TESTS = {
    "tests/engine/test_a.py": SLOW,
    "tests/engine/test_b.py": SLOW.replace("@pytest.mark.slow\n", ""),
    "tests/test_c.py": SLOW.replace("kvjax.engine", "kvjax.eval.tasks"),
    "tests/test_d.py": SLOW.replace("from kvjax.engine import Engine", "from kvjax import engine"),
}


def test_packages():
    assert package("kvjax/engine/_engine.py") == "kvjax.engine"
    assert package("kvjax/cli.py") == "kvjax.cli"
    assert package("tests/test_cli.py") is None
    assert package("kvjax/DESIGN.md") is None


def test_slow_files_of_changed_packages_and_changed_tests():
    assert slow_files(["kvjax/engine/_batch.py"], TESTS) == ["tests/engine/test_a.py", "tests/test_d.py"]
    assert slow_files(["tests/test_c.py"], TESTS) == ["tests/test_c.py"]
    assert slow_files(["kvjax/eval/tasks/niah.py", "README.md"], TESTS) == ["tests/test_c.py"]
    assert slow_files(["kvjax/engineering.py"], TESTS) == []
