"""Ten stored cells of the frontier, measured again on their first samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import decode
from kvjax.eval import tasks
from kvjax.eval.measure import batch, runner, store
from kvjax.eval.tasks.data import find
from kvjax.weights import find as weights_of

FOLDER = Path(__file__).parents[2] / "results" / "frontier"
FIRST = 3
"""Samples of each cell; each is drawn from a generator of its own, whatever their number."""

CELLS = (
    "full",
    "int8(32)",
    "write_gate(0.1, window=32) + sinks(4)",
    "write_gate(0.2, window=32) + sinks(4)",
    "keydiff + uniform(77)",
    "keydiff + uniform(154)",
    "keydiff + uniform(256)",
    "snapkv(32) + uniform(77)",
    "snapkv(32) + uniform(154)",
    "snapkv(32) + uniform(256)",
)
"""Of needles at 512 tokens, the question unseen; few programs, for compiling is most of the time."""
GATES = {CELLS[2]: "conservative", CELLS[3]: "aggressive"}
"""Weights that are not the default."""


@pytest.mark.skipif(find().folder is None, reason="the stored cells were measured on the data pack")
def test_ten_stored_cells_come_out_as_stored():
    model, data = kvjax.load(), find()
    task = tasks.tasks()["niah_word"]
    samples = runner.draw(task, model, data, length=512, seed=0, count=FIRST)
    stored = {}
    for row in store.read(FOLDER):
        cell = row.cell
        wanted = (cell.task, cell.length, cell.samples) == (task.name, 512, 25) and cell.protocol != "aware"
        if wanted and GATES.get(cell.policy, "") in cell.weights:
            stored[cell.policy] = row
    for name in CELLS:
        policy, row = kvjax.policy(name), stored[name]
        chosen = {"write_gate": GATES[name]} if name in GATES else {}
        found = batch.run(
            model,
            policy,
            samples,
            protocol=row.cell.protocol,
            context=decode.bucket(512, model.network.max_positions),
            rows=FIRST,
            weights=weights_of(policy, model, chosen).weights,
        )
        nll = [outcome.nll for outcome in found.outcomes]
        np.testing.assert_allclose(nll, row.each.nll[:FIRST], atol=2e-2, rtol=2e-3, err_msg=name)
