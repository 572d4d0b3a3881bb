"""A folder of results that several files look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_rows import words

from kvjax.eval.__main__ import main


@pytest.fixture
def no_pack(monkeypatch, tmp_path):
    """Generated texts, on every machine."""
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "none"))


@pytest.fixture(scope="session")
def finished(tiny_folder, tmp_path_factory) -> Path:
    """A folder of results."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", str(tmp_path_factory.mktemp("none")))
    out = tmp_path_factory.mktemp("results") / "out"
    assert main(words(tiny_folder, out)) == 0
    patch.undo()
    return out
