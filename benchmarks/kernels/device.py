"""The device benchmark: checks and blocks as ``kvjax.tune`` does them, and times beside other libraries.

Ceilings (a copy, a matrix product) are measured first. After the checks each operation spends half of its
time on its blocks and is timed with those in the other half.
"""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks.kernels.operations import module
from pallas_kernels.measure import device


def targets(op: str, record: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Targets of an operation from its timed cases; none before the ceilings are measured."""
    if "copy_gb_s" not in base:
        return {}
    timed = {**record, "cases": {name: x for name, x in record["cases"].items() if "ms" in x}}
    return {x.name: x.row() for x in module(op.partition(".")[0]).targets(timed, base)}


EXTRA = device.Extra("benchmarks.kernels.on_device", ("ceilings",), "speed", targets)


def measure(
    minutes: float,
    *,
    folder: pathlib.Path | None = None,
    tiny: str | None = None,
    only: tuple[str, ...] = (),
) -> dict[str, device.Record]:
    """The records, by operation; arguments and errors as in ``pallas_kernels.measure.device.measure``."""
    return device.measure(minutes, folder=folder, tiny=tiny, only=only, extra=EXTRA)
