"""Rows on disk and in memory are the same; older ones learn what their policy is from its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_rows import GOOD, changed, row

from kvjax.algebra import PolicyError
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import store
from kvjax.eval.measure.row import as_json, from_json, short

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(ROOT.glob(f"results/**/{store.RESULTS}"))
TAGS = {"depth_from_end": [10.0] * len(GOOD), "gap": [[3, 5]] * len(GOOD)}


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: str(file.parent.relative_to(ROOT / "results")))
def test_committed_rows_read_back_byte_for_byte(file):
    rows, lines = store.read(file.parent), file.read_text(encoding="utf-8").splitlines()
    lines = [line.replace('"gates": "', '"weights": "', 1) for line in lines]  # the cell's, in older rows
    assert [json.dumps(as_json(one), ensure_ascii=False) for one in rows] == lines
    for one in rows:
        assert one.policy["policy"] == one.cell.policy
        assert (one.cell.policy == "full") == (one.parts == frozenset())


def test_results_are_committed():
    assert len(COMMITTED) > 5


def test_a_row_survives_the_disk():
    before = changed(
        row("snapkv(8) + uniform(64)", GOOD, weights="a@0"),
        each={"tags": TAGS, "found": [[1, 0]] * len(GOOD)},
    )
    tree = json.loads(json.dumps(as_json(before)))
    assert tree["each"]["depth_from_end"] == TAGS["depth_from_end"]
    assert not {"tags", "ranked", "output"} & set(tree["each"])
    assert from_json(tree) == before


def test_an_older_row_learns_what_its_policy_is():
    before = row("snapkv(8) + uniform(64)", GOOD)
    older = {name: value for name, value in as_json(before).items() if name != "policy"}
    assert from_json(older) == before
    unknown = older | {"cell": older["cell"] | {"policy": "no_such(8)"}}
    with pytest.raises(PolicyError, match="no_such"):
        from_json(unknown)
    # What is described needs no parser: a method of another package, or one that is gone.
    assert from_json(unknown | {"policy": before.policy}).parts == {"snapkv", "uniform"}


@pytest.mark.parametrize("damage", [{"heads": None, "more": 1}, {"cell": {"task": "niah"}}])
def test_what_is_no_row_is_refused(damage, tmp_path):
    (tmp_path / store.ABOUT).write_text(json.dumps({"schema": store.SCHEMA}))
    (tmp_path / store.RESULTS).write_text(json.dumps(as_json(row("full", GOOD)) | damage) + "\n")
    with pytest.raises(EvalError, match="no row"):
        store.read(tmp_path)


def test_numbers_have_six_digits():
    rounded = short(changed(row("full", [1 / 3, 2 / 3], 123456.789), nll=2 / 3))
    assert (rounded.nll, rounded.score, rounded.each.score) == (0.666667, 0.5, [0.333333, 0.666667])
    assert (rounded.bytes.live, rounded.cell) == (123457.0, row("full", GOOD).cell)
