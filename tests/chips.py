"""Chips that are not here, for tests that compile for them."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.measure import aot


def chip_or_skip(chip: str, topology: str | None = None, *, text: bool = True) -> aot.Target:
    """``aot.target``; skips where no compiler for it is installed, or gives no ``text`` of what it made."""
    if text and chip in aot.GPUS and jax.__version_info__ < (0, 8):
        pytest.skip("jax 0.7 compiles for a GPU and gives no text of it; `--builds` is the gate there")
    try:
        return aot.target(chip, topology)
    except aot.Missing as reason:
        pytest.skip(str(reason))
