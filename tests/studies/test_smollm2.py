"""Tables of the SmolLM2 runs: rivals at no more bytes, texts as one cell, what ``auto`` gets."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from kvjax.eval.measure.row import Row, as_json
from kvjax.eval.measure.store import ABOUT, RESULTS, SCHEMA, read
from kvjax.eval.report import plotting
from kvjax.weights import _auto
from studies import smollm2
from studies.smollm2 import TEXT, Place
from tests import eval_rows

NEEDLES = Place(what="niah", length=1024, protocol="agnostic")
PASSAGES = Place(what=TEXT, length=1024, protocol="agnostic")


def asked(policy: str, scores: list[float], kept: float, protocol: str = "agnostic") -> Row:
    row = eval_rows.row(policy, scores, protocol=protocol, length=1024)
    return dataclasses.replace(row, kept_fraction=kept)


def fed(policy: str, task: str, kl: list[float], top: list[float], kept: float) -> Row:
    row = asked(policy, [0.0] * len(kl), kept, "either")
    each = dataclasses.replace(row.each, kl=kl, top=top, score=[None] * len(kl))
    return dataclasses.replace(
        row,
        cell=dataclasses.replace(row.cell, task=task),
        each=each,
        group=TEXT,
        metric="perplexity",
        score=None,
    )


ROWS = [
    asked("full", [1, 1, 1, 1], 1.0, "either"),
    asked("keydiff + uniform(0.3)", [1, 1, 0, 1], 0.3),
    asked("snapkv + uniform(0.15)", [0, 1, 0, 0], 0.15),
    asked("keydiff + uniform(0.5)", [1, 1, 1, 1], 0.5),
    asked("window(300)", [0, 0, 0, 0], 0.3),
    asked("kvp + uniform(0.3)", [1, 0, 0, 0], 0.3),
    *(
        fed(policy, task, [value, 2 * value], [0.9, top], kept)
        for policy, value, top, kept in (
            ("full", 1e-6, 1.0, 1.0),
            ("keydiff + uniform(0.3)", 0.4, 0.5, 0.3),
            ("snapkv + uniform(0.15)", 0.2, 0.7, 0.15),
            ("window(300)", 0.1, 0.8, 0.3),
            ("kvp + uniform(0.3)", 0.3, 0.6, 0.3),
        )
        for task in ("text_books", "text_gsm8k")
    ),
    fed("random + uniform(0.3)", "text_books", [0.1, 0.1], [1, 1], 0.3),
]


def entry(place: Place, name: str) -> smollm2.Entry:
    return next(entry for entry in smollm2.cells(ROWS)[place] if entry.name == name)


def test_a_rival_is_the_best_other_method_at_no_more_bytes():
    own = entry(NEEDLES, "kvp + uniform(0.3)")
    best = smollm2.rival(own, smollm2.cells(ROWS)[NEEDLES])
    assert best is not None
    assert best.name == "keydiff + uniform(0.3)"  # not 0.5, and not the full cache
    on_text = smollm2.rival(entry(PASSAGES, "kvp + uniform(0.3)"), entries := smollm2.cells(ROWS)[PASSAGES])
    assert on_text is not None
    assert on_text.name == "window(300)"
    coded = [asked("int4", [1, 1, 1, 1], 0.3), asked("conf_kv + uniform(0.5) + int8", [1, 1, 0, 0], 0.5)]
    entries_coded = smollm2.cells(ROWS + coded)[NEEDLES]
    assert smollm2.rival(own, entries_coded) == best  # which can be stored in codes as well
    twice = smollm2.cells([*ROWS, asked("kvzip + uniform(0.3)", [1, 1, 1, 1], 0.3)])[NEEDLES]
    assert smollm2.rival(own, twice) == best  # which feeds a prompt once
    (mine,) = [x for x in entries_coded if x.name.startswith("conf_kv")]
    assert smollm2.rival(mine, entries_coded).name == "int4"
    assert smollm2.rival(entry(PASSAGES, "snapkv + uniform(0.15)"), entries) == entry(
        PASSAGES, "snapkv + uniform(0.15)"
    )


def test_policies_that_lack_a_text_are_in_no_cell_of_texts():
    assert "random + uniform(0.3)" not in {e.name for e in smollm2.cells(ROWS)[PASSAGES]}


def test_what_decides_on_arrival_counts_with_the_question_seen_and_unseen():
    rows = [asked("window(300)", [1, 0], 0.3, "either"), asked("snapkv + uniform(0.3)", [1, 1], 0.3, "aware")]
    seen = dataclasses.replace(NEEDLES, protocol="aware")
    assert [e.name for e in smollm2.cells(rows)[seen]] == ["window(300)", "snapkv + uniform(0.3)"]
    assert NEEDLES not in smollm2.cells(rows)  # nothing to compare a window with there


def test_texts_come_first_and_what_decides_on_arrival_fills_no_table_alone():
    both = [asked("window(300)", [0, 1], 0.3, "either"), asked("write_gate", [1, 1], 0.3, "either")]
    assert list(smollm2.cells([*both, *ROWS])) == [PASSAGES, NEEDLES]
    aware = asked("snapkv + uniform(0.3)", [1, 1], 0.3, "aware")
    assert list(smollm2.cells([*both, aware, *ROWS]))[-1].protocol == "aware"


def test_tables_show_the_difference_on_the_same_samples():
    lines = smollm2.answers(smollm2.cells(ROWS)[NEEDLES]).splitlines()
    (line,) = [line for line in lines if "`kvp + uniform(0.3)`" in line.split(" | ")[0]]
    assert all(part in line for part in ("| 25.0 (", "| -50.0 (", "`keydiff + uniform(0.3)`"))
    (line,) = [x for x in smollm2.passages(smollm2.cells(ROWS)[PASSAGES]).splitlines() if "`kvp" in x]
    assert all(part in line for part in ("| 0.450 (", "| 75.0 (", "| -0.300 ("))


def test_points_weigh_text_and_questions_alike():
    scores = {p.policy: p.score for p in smollm2.points(ROWS, 1024)}
    assert scores == pytest.approx(
        {
            "full": (95 + 100) / 2,
            "keydiff + uniform(0.3)": (70 + 75) / 2,
            "snapkv + uniform(0.15)": (80 + 25) / 2,
            "window(300)": 85 / 2,
            "kvp + uniform(0.3)": (75 + 25) / 2,
        }
    )


def test_the_command_prints_tables_and_writes_what_auto_reads(tmp_path, capsys):
    (tmp_path / RESULTS).write_text("".join(json.dumps(as_json(row)) + "\n" for row in ROWS))
    (tmp_path / ABOUT).write_text(json.dumps({"schema": SCHEMA, "model": "it", "fingerprint": "0" * 16}))
    file = tmp_path / "front.json"
    assert smollm2.main([str(tmp_path), "--out", str(tmp_path), "--front", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "### What the full cache solves" in printed
    assert "### Niah, 1,024 tokens, question unseen" in printed
    front = json.loads(file.read_text())["front"]
    assert [point["policy"] for point in front] == ["snapkv + uniform(0.15)", "keydiff + uniform(0.3)"]
    assert np.isfinite([point["low"] for point in front]).all()
    assert (tmp_path / "bytes.png").exists() == plotting.available()


def test_auto_rests_on_the_stored_rows():
    """What the wheel holds is what ``--front`` writes of results/smollm2/eval."""
    folder = pathlib.Path(__file__).parents[2] / "results" / "smollm2" / "eval"
    facts = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    shipped = (_auto.SHIPPED[0] / _auto.FRONT).read_text(encoding="utf-8")
    assert shipped == smollm2.as_json(read(folder), facts)


def test_the_page_shows_the_stored_rows():
    """results/smollm2/README.md has the tables that the command prints of results/smollm2/eval."""
    folder = pathlib.Path(__file__).parents[2] / "results" / "smollm2"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "\n".join(smollm2.text(read(folder / "eval"))) in page
