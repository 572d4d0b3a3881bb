"""The golden models of tests/golden, and their copies to be spoilt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (
    *("llama3", "llama_tied", "qwen2", "qwen2_window", "llama_bf16_sharded", "qwen3", "mistral"),
    *("phi3", "phi3_long", "phi4_mini", "gemma2", "gemma3", "gpt2"),
    *("qwen2_yarn", "smollm3", "granite", "gpt2_odd"),
    *("qwen3_moe", "qwen3_moe_bf16_sharded", "mixtral", "gpt_oss", "gpt_oss_mxfp4"),
    "olmo2_bf16_sharded",
)


@pytest.fixture(params=NAMES)
def name(request):
    """Each golden model in turn."""
    return request.param


@pytest.fixture
def golden_folder():
    return lambda name: GOLDEN / name


@pytest.fixture
def golden_data():
    return lambda name: dict(np.load(GOLDEN / f"{name}.npz"))


@pytest.fixture
def spoil(tmp_path):
    """Copies a golden and changes config.json keys (a value of ... removes the key)."""

    def copy(name: str, **changes) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(GOLDEN / name, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


@pytest.fixture
def on_two_devices():
    """What ``tests/two_devices.py`` says of a folder's model under a policy."""
    tests = GOLDEN.parent

    def about(folder: Path, policy: str, *words: str) -> dict:
        path = os.pathsep.join([str(tests.parent), str(tests)])
        command = [sys.executable, str(tests / "two_devices.py"), str(folder), policy, *words]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return about
