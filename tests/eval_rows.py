"""Rows for the tests of the command: the words that make a folder of them, and made-up ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.catalogue import describe
from kvjax.catalogue import policy as parse
from kvjax.eval.measure.row import Bytes, Cell, Each, Example, Reads, Reference, Row, Switches

LENGTH, SAMPLES = 384, 5
POLICIES = ("window(160)", "snapkv(8) + uniform(0.25)")


SIZES = ("live", "peak_live", "allocated", "peak_allocated", "prefill_live")


def words(model: Path, out: Path, *more: str) -> list[str]:
    command = ["run", "--task", "niah", "--model", str(model), "--lengths", str(LENGTH), "--out", str(out)]
    command += [word for policy in POLICIES for word in ("--policy", policy)]
    return [*command, "--samples", str(SAMPLES), "--protocol", "both", *more]


def row(
    policy: str,
    scores: list[float],
    live: float = 1.0,
    *,
    told: bool = True,
    protocol: str = "either",
    weights: str = "",
    length: int = 512,
) -> Row:
    """What a judge looks at; the rest is anything."""
    count = len(scores)
    cell = Cell(
        task="niah", length=length, policy=policy, protocol=protocol, seed=0, samples=9, weights=weights
    )
    score = float(np.mean(scores))
    return Row(
        cell=cell,
        policy=describe(parse(policy)),
        group="niah",
        metric="accuracy",
        model="tiny",
        data="generated",
        switches=Switches(compress_at="never", prefill_attention="full", budget="none", sinks=0, recent=0),
        score=score,
        nll=1 - score,
        ranked=None,
        digits=None,
        perplexity=None,
        bits_per_byte=None,
        kept_fraction=0.25,
        peak_fraction=0.25,
        mean_fraction=0.25,
        reads_per_step=live,
        reads=Reads(slots=live, summary=0.0, selector=0.0),
        span_retention=None,
        bytes=Bytes(**dict.fromkeys(SIZES, live), full=100.0),
        heads=[[0.25]],
        each=Each(
            score=scores,
            nll=[1 - s for s in scores],
            tokens=[1] * count,
            kept=[0.25] * count,
            live=[live] * count,
            peak_live=[live] * count,
            retention=[None] * count,
        ),
        example=Example(held=[]),
        full=Reference(score=1.0, nll=0.0, perplexity=None),
        informative=told,
        versions={},
    )


def changed(row: Row, **fields: Any) -> Row:
    """The row with other values; a dict for a nested dataclass replaces fields of it."""
    nested = {
        name: dataclasses.replace(getattr(row, name), **value)
        for name, value in fields.items()
        if isinstance(value, dict) and name != "policy"
    }
    return dataclasses.replace(row, **(fields | nested))


GOOD, BAD = [1.0] * 40, [0.0, 1.0] * 20
