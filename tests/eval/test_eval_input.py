"""What is asked of the command: refusals in one sentence, joined jobs, groups and tasks."""

from __future__ import annotations

import json
import re

import pytest

from kvjax.catalogue import policy as parse
from kvjax.eval import tasks
from kvjax.eval.__main__ import main
from kvjax.eval.measure import grid, store
from kvjax.eval.tasks.data import Data

pytestmark = pytest.mark.usefixtures("no_pack")


def test_jobs_are_joined_so_that_programs_are_compiled_once_a_length_and_prompts_read_once_for_all_budgets():
    both = [tasks.tasks()[name] for name in ("niah", "mqar")]

    def plan(*policies, lengths=(1024, 512)):
        chosen = [parse(policy) for policy in policies]
        return grid.build(both, chosen, lengths=lengths, seeds=[0], samples=1, protocol=("agnostic",))

    one, other = "knorm + uniform(90)", "knorm + uniform(80)"
    joined = grid.joined([plan(one), plan("window(9)"), plan(other), plan("window(8)"), plan(lengths=(512,))])
    cells = [(cell.length, cell.task, cell.policy) for cell in joined.cells]
    programs = [("full",), (one, other), ("window(9)",), ("window(8)",)]
    names = ("niah", "mqar")
    assert cells == [(n, task, p) for n in (512, 1024) for ps in programs for task in names for p in ps]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "niahh"], ["no task 'niahh'", "Groups: niah, ruler", "vt"]),
        (["--task", "gsm8k_nll"], ["gsm8k_nll", "gsm8k/test.jsonl.gz", "KVJAX_DATA"]),
        (["--policy", "snapkw"], ["no 'snapkw'", "snapkv"]),
        (["--policy", "window(512)", "--lengths", "512"], ["illegal for niah at 512", "512 tokens a head"]),
        (["--policy", "knorm + uniform(900)"], ["illegal for niah", "nothing would ever go"]),
        (["--task", "vt", "--lengths", "512"], ["too short", "1024"]),
        (["--lengths", "5.5"], ["--lengths 5.5", "whole number"]),
        (["--samples", "0"], ["--samples 0", "1 or more"]),
        (["--lengths", "8192"], ["--lengths 8192", "512 positions"]),
        (["--protocol", "seen"], ["--protocol", "agnostic"]),
        (["--model", "/no/such/folder"], ["/no/such/folder"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "Write it like"]),
        (["--gates", "nowhere"], ["--gates nowhere is given", "nothing in", "is learned"]),
        (["--weights", "nowhere"], ["--weights nowhere is not a list of PART=FILE"]),
    ],
)
def test_bad_input_is_one_sentence_and_two(words, says, tiny_folder, tmp_path, capsys):
    command = ["run", "--task", "niah", "--model", str(tiny_folder), "--out", str(tmp_path / "out")]
    command = command[:1] + command[3:] if "--task" in words else command
    command = [*command, *words]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    message = err[err.index("error: ") :]
    assert message.count("\n") == 1
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"lengths": 512}, "lengths: 512 is not a list of whole numbers, 64 or more"),
        ({"lengths": [5]}, "lengths: [5] is not a list"),
        ({"policies": "full"}, "policies: 'full' is not a list of names"),
        ({"samples": 0}, "samples: 0 is out of range"),
        ({"protocols": ["seen"]}, "protocols: ['seen']"),
        ({"gates": "default", "weights": {"duo": "default"}}, "gates: default and weights: "),
        ({"weights": {"duo": "default"}}, "weights duo=default are given, but nothing in any policy"),
        ({"jobs": [{"task": "niah"}]}, "cannot be used"),
    ],
)
def test_a_config_is_checked_word_by_word(job, says, tmp_path, capsys):
    grid = {"policies": ["int8"], "jobs": [{"lengths": [512], "tasks": ["niah"]}]}
    where = job if "jobs" in job else {"jobs": [grid["jobs"][0] | job]}
    (tmp_path / "grid.yaml").write_text(json.dumps(grid | where))  # JSON is YAML
    assert main(["run", "--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_a_group_leaves_out_what_has_no_data():
    present, absent = tasks.named(["ppl", "gsm"], Data(None))
    assert [task.name for task in present] == ["ppl_books", "gsm_synth"]
    assert {task.name for task in absent} == {"ppl_wikitext", "gsm8k_nll", "gsm8k_numbers"}


def test_tasks_are_listed_with_the_length_they_need(capsys):
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ruler +vt +from +1024 tokens", out)
    ruler = [task.name for task in tasks.tasks().values() if task.group == "ruler"]
    assert len(ruler) == 14  # RULER's thirteen, and the twin of its two-hop questions


STAGES = """
samples: 2
lengths: [256]
jobs:
  - {stage: a, tasks: [niah, mqar], policies: [full]}
  - {stage: d, tasks: [mqar, niah], policies: ["window(40)"], solved: 1}
"""


def test_stages_are_chosen_by_name_and_solved_tasks_by_the_rows_that_are_there(
    tiny_folder, tmp_path, capsys, monkeypatch
):
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(STAGES)
    command = ["run", "--config", str(config), "--model", str(tiny_folder), "--out", str(out), "--stage"]
    assert main([*command, "e"]) == 2
    assert "--stage e: the config has a, d." in capsys.readouterr().err
    assert main([*command, "d"]) == 2
    assert "of mqar, niah the full cache solves 0" in capsys.readouterr().err
    monkeypatch.setattr("kvjax.eval.measure.tally.INFORMATIVE", 0.0)
    assert main([*command, "a"]) == 0
    assert [row.cell.task for row in store.read(out)] == ["niah", "mqar"]
    assert main([*command, "d"]) == 0
    assert "solves 2" in capsys.readouterr().err
    assert [(row.cell.task, row.cell.policy) for row in store.read(out)[2:]] == [("mqar", "window(40)")]
