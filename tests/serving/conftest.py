"""A server that allows everything, for a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_client import Running, running


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Running]:
    """One that allows everything."""
    with running(tiny_folder, "--max-choices", "8", "--max-body", "64KiB") as server_running:
        yield server_running
