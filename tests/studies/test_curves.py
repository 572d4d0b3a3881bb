"""Learning curves: what counts as a check, and as flat."""

from __future__ import annotations

import json

import pytest

from kvjax.eval.report import plotting
from studies import curves


def log(folder, name: str, checks: dict[int, float]) -> None:
    lines = []
    for step, value in checks.items():
        lines += [
            {"step": step, "held_completed": value},
            {"step": step + 1, "loss": 9.0, "held_completed": 9.0},
        ]
    lines.append({"counts": [1]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_curve_is_flat_by_its_last_quarter(tmp_path):
    log(tmp_path, "still", {0: 4.0, 50: 2.0, 75: 1.0, 90: 0.9, 100: 0.99})
    log(tmp_path, "moves", {0: 4.0, 50: 2.0, 76: 1.0, 100: 0.99})  # 76 lies in the last quarter: 50 counts
    still, moves = (curves.read(tmp_path / f"{name}.jsonl") for name in ("still", "moves"))
    assert still.steps == (0, 50, 75, 90, 100)
    assert (still.change, moves.change) == pytest.approx((-0.01, 0.99 / 2 - 1))
    rows = [line.split(" | ") for line in curves.text([moves, still]).splitlines()[2:]]
    assert [row[-1].strip(" |") for row in rows] == ["no", "yes"]
    assert rows[0][2:5] == ["100", "4", "0.99"]


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    log(tmp_path, "phi", {0: 4.0, 100: 1.0})
    picture = ["--out", str(tmp_path / "it.png")] if plotting.available() else []
    assert curves.main([str(tmp_path), *picture]) == 0
    assert "| `phi` |" in capsys.readouterr().out
    assert (tmp_path / "it.png").exists() == plotting.available()


def test_a_folder_without_logs_is_refused(tmp_path, capsys):
    assert curves.main([str(tmp_path)]) == 2
    assert "has no logs" in capsys.readouterr().err
