"""Processor time of a call, and a model that reads prompts longer than it was trained for."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from kvjax.loading import LanguageModel

REPEATS = 3


def least(run: Callable[[], Any]) -> float:
    """Processor seconds, the least of ``REPEATS`` calls after the first."""
    return min([_once(run) for _ in range(REPEATS + 1)][1:])


def beside(first: Callable[[], Any], others: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Calls timed in turn, so that a slow minute of the machine falls on all of them.

    Processor seconds of each (the least of ``REPEATS`` rounds after a first, ``first`` under that name) and,
    under ``over``, the median over rounds of what each of ``others`` takes over ``first``, as a share of it.
    """
    runs = {"first": first, **others}
    rounds = [{name: _once(run) for name, run in runs.items()} for _ in range(REPEATS + 1)][1:]
    over = {name: statistics.median(r[name] / r["first"] for r in rounds) - 1 for name in others}
    return {name: min(r[name] for r in rounds) for name in runs} | {"over": over}


def _once(run: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def wide(model: LanguageModel, length: int) -> LanguageModel:
    """The model with positions for ``length`` tokens; of one with a table of positions, as it is."""
    if model.spec.positions != "rope" or length <= model.spec.max_positions:
        return model
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_positions=length))
