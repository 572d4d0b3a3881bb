"""Which slow tests ``.ci/run BASE`` runs."""

from __future__ import annotations

from changed import NOTEBOOKS, RUNS, exported, notebooks, package, slow_files

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


def test_notebooks_of_changed_sources_parts_and_methods():
    exports = exported("from kvjax.loading import load\nfrom kvjax.decode import generate, prefill")
    sources = {
        "notebooks/a.py": "import kvjax\nmodel = kvjax.load()",
        "notebooks/b.py": "import kvjax\nkvjax.generate(model, 'snapkv(8) + ada(0.5)')",
        "notebooks/c.py": "from train import gates",
    }

    def run(*changed: str) -> str:
        lines = notebooks(list(changed), sources, exports)
        assert all(line.startswith(f"{NOTEBOOKS}::{RUNS}[") for line in lines)
        return "".join(line[-2] for line in lines)

    assert run("notebooks/a.py", "README.md") == "a"
    assert run("kvjax/loading.py") == "a"
    assert run("kvjax/decode/_step.py") == "b"
    assert run("kvjax/policies/snapkv.py") == "b"
    assert run("kvjax/policies/h2o.py") == ""
    assert run("train/gates.py") == "c"
    assert run("notebooks/_execute.py") == "abc"
