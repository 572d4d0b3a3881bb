"""Cells in which KVP is at the top: counted on made-up rows."""

from __future__ import annotations

import dataclasses

import numpy as np
from eval_rows import row

from studies.kvp import cells

ALWAYS, NEVER = [1.0] * 40, [0.0] * 40
HALF, OTHER = [0.0, 1.0] * 20, [1.0, 0.0] * 20


def cell(own: list[float], rival: list[float], length: int, weights: str = "default@0a") -> list:
    """KVP beside a rival and one that reads attention; weaker rivals do not matter."""
    return [
        row("kvp(4) + uniform(64)", own, 25, weights=weights, length=length),
        row("keydiff + uniform(64)", rival, 25, length=length),
        row("knorm + uniform(64)", NEVER, 25, length=length),
        row("snapkv(32) + uniform(64)", ALWAYS, 25, length=length),
        row("random + uniform(99)", ALWAYS, 40, length=length),
    ]


def test_a_cell_is_alone_tied_within_or_behind():
    few = list(np.arange(40) < 18)  # 45 %, of 50
    rows = [
        *cell(ALWAYS, HALF, 512),  # alone
        *cell(HALF, OTHER, 640),  # tied
        *cell([float(x) for x in few], HALF, 768),  # behind, within the interval
        *cell(NEVER, HALF, 1024),  # behind
        *cell(ALWAYS, HALF, 2048, weights="ruler@0a"),  # other weights
    ]
    assert cells.count(rows) == cells.Count(cells=4, alone=1, tied=1, within=3)
    assert cells.count(rows, "ruler") == cells.Count(cells=1, alone=1, tied=0, within=1)


def test_perplexity_is_no_accuracy():
    rows = [dataclasses.replace(x, metric="perplexity", perplexity=9.0) for x in cell(ALWAYS, HALF, 512)]
    assert cells.count(rows).cells == 0
