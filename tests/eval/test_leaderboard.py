"""The leaderboard: who stands on it, with which score, and what it says while it is empty."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from eval_rows import BAD, GOOD, changed, row

from kvjax.eval import arguments
from kvjax.eval.__main__ import main
from kvjax.eval.measure.row import as_json
from kvjax.eval.measure.store import ABOUT, RESULTS, SCHEMA
from kvjax.eval.report import leaderboard

ROOT = Path(__file__).parents[2]
ALL = [1.0] * 200


def folder(home: Path, rows, **facts) -> Path:
    home.mkdir()
    (home / RESULTS).write_text("".join(json.dumps(as_json(one)) + "\n" for one in rows))
    (home / ABOUT).write_text(json.dumps({"schema": SCHEMA}))
    if facts:
        (home / "suite.json").write_text(json.dumps(facts))
    return home


def of(policy: str, task: str, scores, samples: int, group: str = "kvpress-ruler-4k", **more):
    cell = {"task": task, "samples": samples}
    return changed(row(policy, scores), cell=cell, group=group, model="owner/model", **more)


def test_a_score_is_the_mean_over_tasks_and_only_whole_runs_stand(tmp_path):
    rows = [of("full", "vt", GOOD, 40), of("full", "qa_1", [1.0], 1)]
    rows += [of("int8(8)", "vt", BAD, 40), of("int8(8)", "qa_1", [1.0], 1)]
    rows += [of("tova + uniform(0.5)", "vt", GOOD, 40)]  # not measured on qa_1
    home = folder(tmp_path / "run", rows, by="somebody", device="1 x NVIDIA L4", day="2026-11-26")
    (board,) = leaderboard.boards([home, tmp_path])
    assert (board.name, board.model) == ("kvpress-ruler-4k", "owner/model")
    assert [(one.policy, one.score) for one in board.standings] == [("full", 100), ("int8(8)", 75)]
    second = board.standings[1]
    assert (second.tasks, second.samples, second.kept, second.bytes) == (2, 41, 25, 1)
    assert (second.by, second.device, second.day) == ("somebody", "1 x NVIDIA L4", "2026-11-26")
    page = leaderboard.page([board], "COMMAND")
    assert (
        "| `int8(8)` | either | 75.00 | 25.0 | 1.0 | 2 / 41 | somebody, 1 x NVIDIA L4, 2026-11-26 |" in page
    )
    assert "    COMMAND\n" in page
    assert "Nobody has measured" not in page


def test_own_tasks_need_enough_samples_and_public_boards_come_first(tmp_path):
    own = [of("full", "niah", ALL, 200, "niah"), of("full", "niah", GOOD, 40, "niah")]
    both = [folder(tmp_path / "own", own), folder(tmp_path / "qa", [of("full", "vt", GOOD, 40)])]
    found = leaderboard.boards(both)
    assert [len(board.standings) for board in found] == [1, 1]
    page = leaderboard.page(found, "COMMAND")
    assert page.index("## kvpress-ruler-4k") < page.index("## kvjax's own tasks at 512 tokens")
    assert "the project, CPU, not recorded, –" in page


def test_an_empty_page_says_so_and_gives_the_command(tmp_path):
    page = leaderboard.write([], tmp_path / "to").read_text()
    assert "Nobody has measured" in page
    (command,) = re.findall(r"python -m kvjax.eval run (.*?)\n\n", page, re.S)
    parsed = arguments.parse(["run", *shlex.split(command.replace("\\\n", " "))])
    assert parsed.values["suite"] == "kvpress-ruler-4k"
    assert parsed.values["model"] == "Qwen/Qwen3-8B"


def test_folders_beside_the_page_are_on_it(tmp_path, capsys):
    to = tmp_path / "to"
    to.mkdir()
    folder(to / "mine", [of("full", "vt", GOOD, 40)])
    assert main(["leaderboard", "--to", str(to)]) == 0
    assert "owner/model" in (to / "README.md").read_text()
    assert main(["leaderboard", str(tmp_path), "--to", str(to)]) == 2
    assert "has no results.jsonl" in capsys.readouterr().err


def test_the_page_in_the_repository_is_what_the_command_makes(monkeypatch, tmp_path):
    stored = ROOT / "results" / "leaderboard" / "README.md"
    monkeypatch.chdir(ROOT)
    found = leaderboard.boards([Path("results/frontier")])
    command = "python -m kvjax.eval leaderboard results/frontier --to results/leaderboard"
    assert stored.read_text("utf-8") == leaderboard.page(found, command)
