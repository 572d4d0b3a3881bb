"""An engine on a mesh serves what one on one device serves; meshes that cut rows are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from kvjax.decode import RequestError
from kvjax.engine import pages as paging
from kvjax.engine import settings
from kvjax.sharding.mesh import ONE, sizes_of

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=4", "tensor=2,context=2"])
def test_an_engine_on_a_mesh_serves_what_one_device_serves(mesh):
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_mesh.py"), mesh],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens"]
    assert result["held"]
    assert result["live"]
    assert result["logprobs"] < 5e-5
    assert result["slots"] > 500
    assert set(result["used"]) == {0}  # every page is back once its row is gone


def test_pages_are_counted_on_the_device_that_needs_most():
    live = np.asarray([[9], [17], [8], [1]])  # two heads a device, pages of 8
    assert paging.pages_for(live, 8, 1).tolist() == [2 + 3 + 1 + 1]
    assert paging.pages_for(live, 8, 2).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("mesh", "share", "message"),
    [
        (
            "data=2",
            None,
            r"takes rows one by one, and data=2,tensor=1,context=1 cuts rows along data\. Give all",
        ),
        ("tensor=2", True, r"share_pages=True\) is for one device, and the model lies on data=1,tensor=2"),
    ],
)
def test_a_mesh_that_an_engine_cannot_use_is_refused(monkeypatch, mesh, share, message):
    monkeypatch.setattr(settings, "mesh_of", lambda _: sizes_of(mesh))
    sizes = {"kv_memory": 1, "context": None, "page": None, "share": None, "share_pages": share}
    with pytest.raises(RequestError, match=message):
        settings.EngineSettings.checked(tiny.model(), **sizes)


def test_a_mesh_over_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RequestError, match="in one process, and .* lies over several"):
        settings.check_mesh("Engine(model=...)", sizes_of("tensor=2"))
    settings.check_mesh("Engine(model=...)", ONE)  # each process may have an engine of its own
