"""Hub ids, read offline from a cache as huggingface_hub lays it out: blobs by hash, snapshots of links."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub import constants

import kvjax
from kvjax.models import hf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import kvjax
model = kvjax.load("owner/tiny")
print(model.name, model.folder.name, float(model.params["embed"].sum()), model.text.encode("hello"))
"""


@pytest.fixture
def home(tiny_folder, tmp_path) -> Path:
    """An HF_HOME whose cache holds one repository with every file of a model folder."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in tiny_folder.iterdir():
        content = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return tmp_path


def test_a_user_s_cache_is_enough(home, tiny_folder):
    """A fresh process that knows HF_HOME alone loads the weights and the tokenizer."""
    known = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    known = {name: value for name, value in known.items() if name not in ("HF_HUB_CACHE", "HF_ENDPOINT")}
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=known, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    model = kvjax.load(tiny_folder)
    told = f"owner/tiny {COMMIT} {float(model.params['embed'].sum())} {model.text.encode('hello')}\n"
    assert ran.stdout == told


def test_what_the_cache_lacks_is_refused_without_a_network(home, tiny_folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded, wanted = hf.load("owner/tiny"), hf.load(tiny_folder)
    assert loaded.spec == wanted.spec
    jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted.params)
    with pytest.raises(hf.ModelError, match="could not fetch it from the hub") as caught:
        kvjax.load("owner/other")
    assert "\n" not in str(caught.value)
