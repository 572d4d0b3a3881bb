"""Notebooks: every source runs from top to bottom, and the executed file beside it is that source."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvjax.decode import _by_layer
from notebooks import _execute

ROOT = Path(__file__).parents[1]
SOURCES = _execute.sources()

every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


@functools.cache
def run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A notebook's run: once for all tests, with a program a layer where six layers would be one.

    ``test_a_deep_model_writes_the_same`` has that these write the same, and README's example runs as it is.
    """
    if 'doctor.need("plot")' in path.read_text(encoding="utf-8"):
        pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_by_layer, "DEEP", 1)
        return _execute.execute(path)


def stored(path: Path) -> dict[str, Any]:
    """The executed notebook in the repository."""
    return json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))


def printed(notebook: dict[str, Any]) -> list[str]:
    """Lines that all cells show, but for versions and devices."""
    cells = [cell for cell in notebook["cells"] if "doctor.devices()" not in "".join(cell["source"])]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return ["".join(o.get("text") or o["data"]["text/plain"]) for o in outputs]


@pytest.mark.slow
@every_source
def test_the_source_runs(path: Path) -> None:
    _, names = run(path)
    assert "kvjax" in names


@every_source
def test_the_executed_file_has_the_cells_of_its_source(path: Path) -> None:
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in stored(path)["cells"]]
    assert cells == _execute.cells(path), "run: python notebooks/_execute.py"


@pytest.mark.slow
@every_source
def test_the_executed_file_shows_what_the_source_prints(path: Path) -> None:
    # What a cache that lost the number makes up may differ between releases of JAX.
    # So may whatever is measured, in lines that say so, and the records of training.
    made_up = re.compile(r"' (?!48213)[^'\n]*' *|^.*(?: s|/s|measured|Figure)\b.*$|^\{.*$", re.M)
    now, then = (made_up.sub("", "\n".join(printed(n))) for n in (run(path)[0], stored(path)))
    assert now == then, "run: python notebooks/_execute.py"


@every_source
def test_the_first_cells_install_what_one_variable_names_and_say_what_is_here(path: Path) -> None:
    (kind, title), (_, install), (_, said) = _execute.cells(path)[:3]
    assert kind == "markdown"
    assert title.startswith("# ")
    body = [line for line in install.splitlines() if line and not line.startswith((" ", "#"))]
    assert body[0].startswith('KVJAX = ""')
    assert body[1:] == ["if KVJAX:"]
    assert "doctor.software()" in said
    assert "doctor.devices()" in said
    # There is no public address yet.
    assert "github.com" not in path.read_text(encoding="utf-8")


@every_source
def test_the_metadata_names_the_runtime(path: Path) -> None:
    said = stored(path)["metadata"]
    assert said == _execute.metadata(path)
    assert said["accelerator"] in ("NONE", "GPU", "TPU")


def test_a_figure_is_stored_as_a_picture() -> None:
    class Figure:
        def savefig(self, file, **how):
            file.write(b"png")

    (output,) = _execute._outputs("figure", {"figure": Figure()}, 1)
    assert output["data"]["image/png"] == "cG5n"


def test_the_first_cell_asks_for_the_jax_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: calls.append(command))
    import jax

    for path in SOURCES:
        install = _execute.cells(path)[1][1]
        exec(compile(install, path.name, "exec"), {})
        assert not calls  # kvjax is here
        exec(compile(install.replace('KVJAX = ""', 'KVJAX = "a.whl"', 1), path.name, "exec"), {})
        assert calls[-1][1:4] == ["-m", "pip", "install"]
        assert calls[-1][-2] == "a.whl"
        assert calls[-1][-1] == f"jax=={jax.__version__}"
        assert not {"-U", "--upgrade", "--force-reinstall"} & set(calls.pop())


@pytest.mark.slow
def test_quickstart_recalls_the_needle() -> None:
    path = next(path for path in SOURCES if path.stem == "quickstart")
    rows = {spec: (answer, live) for spec, answer, live, _ in run(path)[1]["rows"]}
    assert "48213" in rows["full"][0]
    assert rows["snapkv + uniform(0.25)"][1] < 0.5 * rows["full"][1]
