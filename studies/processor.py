"""Processor time of a call, and a model that reads prompts longer than it was trained for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from kvjax.loading import LanguageModel

REPEATS = 3


def least(run: Callable[[], Any]) -> float:
    """Processor seconds, the least of ``REPEATS`` calls after the first."""
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        jax.block_until_ready(run())
        found.append(time.process_time() - start)
    return min(found)


def wide(model: LanguageModel, length: int) -> LanguageModel:
    """The model with positions for ``length`` tokens; of one with a table of positions, as it is."""
    if model.spec.positions != "rope" or length <= model.spec.max_positions:
        return model
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_positions=length))
