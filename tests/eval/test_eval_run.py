"""The command from end to end on a tiny random model: rows, resuming, pairing, reports, claims, bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import quick_compiles  # noqa: F401

from kvjax.eval import claims as claims_module
from kvjax.eval import judges, match, runner, store, table, tasks
from kvjax.eval.__main__ import main
from kvjax.eval.data import Data
from kvjax.eval.table import Results
from kvjax.loading import load

LENGTH, SAMPLES = 384, 5
POLICIES = ("window(160)", "snapkv(8) + uniform(0.25)")


def words(model: Path, out: Path, *more: str) -> list[str]:
    given = ["run", "--task", "niah", "--model", str(model), "--lengths", str(LENGTH), "--out", str(out)]
    given += [word for policy in POLICIES for word in ("--policy", policy)]
    return [*given, "--samples", str(SAMPLES), "--protocol", "both", *more]


@pytest.fixture(autouse=True)
def no_pack(monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_DATA", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory) -> Path:
    """A folder of results."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KVJAX_DATA", str(tmp_path_factory.mktemp("none")))
    out = tmp_path_factory.mktemp("results") / "out"
    assert main(words(tiny_folder, out)) == 0
    patch.undo()
    return out


def lines(folder: Path) -> list[bytes]:
    return (folder / store.RESULTS).read_bytes().split(b"\n")[:-1]


def test_a_row_says_everything(finished):
    rows = store.read(finished)
    cells = [(row["cell"]["policy"], row["cell"]["protocol"]) for row in rows]
    window, snap = POLICIES
    assert cells == [("full", "either"), (window, "either"), (snap, "agnostic"), (snap, "aware")]
    for row in rows:
        assert set(row["switches"]) == {"compress_at", "prefill_attention", "budget", "sinks", "recent"}
        assert {"live", "allocated", "peak_live", "peak_allocated", "full"} <= set(row["bytes"])
        for name in ("score", "nll", "kept_fraction", "peak_fraction", "mean_fraction", "reads_per_step"):
            assert isinstance(row[name], float), name
        assert row["data"] == "generated"
        assert row["full"]["nll"] == rows[0]["nll"]
        assert row["informative"] is False  # random weights find nothing
        assert set(row["versions"]) == {"kvjax", "jax", "python"}
        assert len(row["each"]["nll"]) == SAMPLES
        assert np.shape(row["heads"]) == (2, 2)
    assert [row["switches"]["compress_at"] for row in rows] == ["never", "write", "context", "prompt"]
    assert [row["switches"]["prefill_attention"] for row in rows] == ["full", "policy", "full", "full"]


def test_what_is_kept_is_measured(finished, tiny_folder):
    full, window, agnostic, aware = store.read(finished)
    assert full["kept_fraction"] == full["span_retention"] == 1
    tokens = [len(full["example"]["pieces"])]
    assert agnostic["span_retention"] < 1
    # Everything at once, a quarter of it: the prefix comes after in aware, the question too in agnostic.
    assert 0.24 < aware["kept_fraction"] < agnostic["kept_fraction"] < 0.6
    assert 0.35 < window["kept_fraction"] < 0.5
    # A window holds the newest 160 tokens and no other, in every layer and head alike; the prompt's last
    # token is not in yet when the answer begins.
    model = load(tiny_folder)
    drawn = runner.draw(tasks.tasks()["niah"], model, Data(None), length=LENGTH, seed=0, count=SAMPLES)
    for (_, encoded), told in zip(drawn, window["each"]["retention"]):
        seen = len(encoded.context) + len(encoded.question) + len(encoded.prefix) - 1
        assert told == pytest.approx((np.flatnonzero(encoded.needed) >= seen - 160).mean(), abs=1e-5)
    held = dict(zip(window["each"]["depth_from_end"], window["each"]["retention"]))
    assert held[90] == 0 < held[10]
    assert sum(window["example"]["held"]) / 4 == 160
    assert max(full["example"]["held"]) == 4
    assert tokens[0] < len(full["example"]["held"]) < LENGTH
    for row in (window, agnostic, aware):
        assert row["bytes"]["live"] / row["bytes"]["full"] == pytest.approx(row["kept_fraction"], abs=0.06)
        assert row["bytes"]["live"] <= row["bytes"]["allocated"]


def test_policies_see_the_same_samples(finished):
    rows = store.read(finished)
    for name in ("tokens", "depth_from_end"):
        assert all(row["each"][name] == rows[0]["each"][name] for row in rows)
    # Equal likelihoods where nothing was lost: the window holds the whole of no sample, so none may be equal.
    assert not set(rows[0]["each"]["nll"]) & set(rows[1]["each"]["nll"])


def test_a_killed_run_goes_on_and_ends_in_the_same_file(finished, tiny_folder, tmp_path, monkeypatch):
    whole = (finished / store.RESULTS).read_bytes()
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    torn = b"\n".join([*lines(finished)[:2], lines(finished)[2][:200]])
    (out / store.RESULTS).write_bytes(torn)
    measured = []
    real = runner._measured
    monkeypatch.setattr(runner, "_measured", lambda cell, *rest: measured.append(cell) or real(cell, *rest))
    assert main(words(tiny_folder, out)) == 0
    assert (out / store.RESULTS).read_bytes() == whole
    assert [cell.protocol for cell in measured] == ["agnostic", "aware"]
    measured.clear()
    assert main(words(tiny_folder, out)) == 0
    assert measured == []
    assert (out / store.RESULTS).read_bytes() == whole


def test_text_is_judged_by_its_likelihood_and_labels_by_rank(tiny_folder, tmp_path, capsys):
    given = ["run", "--task", "ppl_books,babilong_qa4", "--model", str(tiny_folder), "--lengths", str(LENGTH)]
    assert main([*given, "--samples", str(SAMPLES), "--out", str(tmp_path)]) == 0
    text, rooms = store.read(tmp_path)
    assert text["score"] is None
    nll, tokens = text["each"]["nll"], text["each"]["tokens"]
    assert text["perplexity"] == pytest.approx(np.exp(np.dot(nll, tokens) / sum(tokens)), rel=1e-3)
    assert text["informative"] is True
    # The tiny model's tokens are bytes: bits a byte are bits a token.
    assert text["bits_per_byte"] == pytest.approx(np.log2(text["perplexity"]), rel=1e-3)
    assert rooms["perplexity"] is None
    assert set(rooms["each"]["ranked"]) <= {0, 1}
    assert rooms["ranked"] == pytest.approx(np.mean(rooms["each"]["ranked"]))
    assert "ppl " in capsys.readouterr().out


def test_a_report_shows_every_policy(finished, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(finished), "--to", str(tmp_path)]) == 0
    named = {Path(line).name for line in capsys.readouterr().out.split()}
    assert named == {"report.md", "report.html", "bytes.png", "heads.png", "depth.png"}
    told = (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    for policy in ("full", "window(160)", "snapkv(8) + uniform(0.25), aware"):
        assert f"`{policy}`" in told
        assert f"<code>{policy}</code>" in page
    assert "niah 384, %" in told
    assert "\\*" in told  # not informative
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in re.sub(r"https://arxiv\S+", "", page)  # nothing is fetched
    rows = store.read(finished)
    streams = page.count('title="4 of 4"')
    assert streams >= sum(held == 4 for row in rows[1:] for held in row["example"]["held"][:300]) // 2 > 0
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("bytes", "heads", "depth"))


def test_claims_that_nobody_ran_say_so(finished, capsys):
    assert main(["claims", str(finished), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == len(claims_module.CLAIMS)
    assert len({line["id"] for line in told}) == len(told)
    verdicts = {line["id"]: line["verdict"] for line in told}
    for paper in ("wg-kv", "conf-kv", "kvp", "topk-phi", "gvote"):
        assert any(name.startswith(paper) for name in verdicts)
    assert verdicts["gvote/memory"] == judges.NOT_RUN
    assert verdicts["conf-kv/int8"] == judges.NOT_RUN
    assert main(["claims", str(finished)]) == 0
    assert capsys.readouterr().out.count("\n") == len(told) + 2


def row(policy: str, scores: list[float], live: float, *, told: bool = True, protocol: str = "either"):
    """What a judge looks at."""
    return {
        "cell": {
            "task": "niah",
            "length": 512,
            "policy": policy,
            "protocol": protocol,
            "seed": 0,
            "samples": 9,
        },
        "group": "niah",
        "metric": "accuracy",
        "informative": told,
        "score": float(np.mean(scores)),
        "kept_fraction": 0.25,
        "bytes": {"live": live, "peak_live": live, "full": 100.0},
        "each": {"score": scores, "nll": [1 - s for s in scores], "tokens": [1] * len(scores)},
    }


def test_judges_follow_the_rows():
    good, bad = [1.0] * 40, [0.0, 1.0] * 20
    full = row("full", good, 100)
    better = judges.better(judges.uses("snapkv"), judges.uses("random"))

    def judged(*rows):
        return better(Results((full, *rows))).verdict

    assert judged(row("snapkv + uniform(8)", good, 25), row("random + uniform(8)", bad, 25.4)) == judges.HOLDS
    assert judged(row("snapkv + uniform(8)", bad, 25), row("random + uniform(8)", good, 25)) == judges.FAILS
    assert judged(row("snapkv + uniform(8)", good, 25), row("random + uniform(8)", bad, 26)) == judges.NOT_RUN
    silent = (row(f"{name} + uniform(8)", good, 25, told=False) for name in ("snapkv", "random"))
    assert judged(*silent) == judges.SILENT
    apart = row("snapkv + uniform(8)", good, 25, protocol="aware")
    assert judged(apart, row("random + uniform(8)", bad, 25, protocol="agnostic")) == judges.NOT_RUN
    within = judges.within(judges.uses("snapkv"), 1.0)
    assert within(Results((full, row("snapkv + uniform(8)", good, 25)))).verdict == judges.HOLDS
    assert within(Results((full, row("snapkv + uniform(8)", bad, 25)))).verdict == judges.FAILS
    small = judges.smaller(judges.uses("gvote"), judges.uses("snapkv"), 2.0)
    rows = (
        full,
        row("gvote", good, 20),
        row("snapkv + uniform(8)", bad, 25),
        row("snapkv + uniform(9)", good, 50),
    )
    assert small(Results(rows)).ours.startswith("2.50×")
    assert table.quality(full) == good


def test_a_perplexity_gap_is_the_worst_cell_s():
    def text(policy, nll):
        made = row(policy, [0.0] * 10, 50)
        return made | {
            "metric": "perplexity",
            "perplexity": float(np.exp(nll)),
            "each": made["each"] | {"nll": [nll] * 10},
        }

    gap = judges.ppl_gap(judges.uses("int8"), 0.34)
    full, mine = text("full", 3.0), text("int8", 3.01)
    assert gap(Results((full, mine))).verdict == judges.HOLDS
    assert gap(Results((full, text("int8", 3.03)))).verdict == judges.FAILS
    beats = judges.better(judges.uses("int8"), judges.uses("random"), text=True)
    rows = (full, mine, text("random + uniform(8)", 3.2))
    assert beats(Results(rows)).ours.startswith("+0.190 nats a token")
    assert beats(Results(rows)).verdict == judges.HOLDS
    assert judges.better(judges.uses("int8"), judges.uses("random"))(Results(rows)).verdict == judges.NOT_RUN
    closed = judges.gap_closed(judges.uses("snapkv"), judges.uses("window"), 0.5)
    rows = (text("full", 2.0), text("window(9)", 3.0), text("snapkv + pyramid(9)", 2.2))
    assert closed(Results(rows)).ours == f"{100 * (np.exp(3) - np.exp(2.2)) / (np.exp(3) - np.exp(2)):.0f} %"


@pytest.mark.parametrize(
    ("measure", "target", "first"),
    [
        (lambda n: 100 * n, 5000, 50),
        (lambda n: 100 * n + 4000, 9100, 91),
        (lambda n: 100 * max(n, 32) + 7 * n, 8000, 10),
        (lambda n: 64 * -(-n // 64) + 40 * n, 9000, 5),
        (lambda n: 3000 * n**0.5, 33000, 400),
    ],
)
def test_a_budget_is_found_within_two_percent(measure, target, first):
    asked = []
    tokens, size = match.search(lambda n: asked.append(n) or measure(n), target, first=first)
    assert abs(size / target - 1) <= match.TOLERANCE
    assert size == measure(tokens)
    assert len(asked) == len(set(asked)) <= match.TRIES


def test_a_budget_that_cannot_be_matched_is_the_nearest():
    tokens, size = match.search(lambda n: 1000.0 if n < 30 else 5000.0, 3000, first=7)
    assert size in (1000, 5000)
    assert tokens > 0


@pytest.mark.slow
def test_matched_policies_hold_the_same_bytes(tiny_folder, capsys):
    words = [
        "match",
        "--task",
        "niah",
        "--model",
        str(tiny_folder),
        "--lengths",
        str(LENGTH),
        "--samples",
        "3",
    ]
    assert main([*words, "--policy", "snapkv(8) + uniform({})", "--like", "window(160)"]) == 0
    like, found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert like["policy"] == "window(160)"
    assert re.fullmatch(r"snapkv\(8\) \+ uniform\(\d+\)", found["policy"])
    assert abs(found["live"] / like["live"] - 1) <= 0.02
    assert found["allocated"] >= found["live"]
    assert found["peak_allocated"] > like["peak_allocated"]  # the whole prompt of a layer, once


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
    ],
)
def test_bad_input_is_one_sentence_and_two(words, says, tiny_folder, tmp_path, capsys):
    given = ["run", "--task", "niah", "--model", str(tiny_folder), "--out", str(tmp_path / "out")]
    given = given[:1] + given[3:] if "--task" in words else given
    given = [*given, *words]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    message = err[err.index("error: ") :]
    assert message.count("\n") == 1
    for part in says:
        assert part in message


def test_results_of_another_version_are_left_alone(finished, tiny_folder, tmp_path, capsys):
    out = tmp_path / "out"
    for name, value in (("kvjax", "0.0.1"), ("weights", "f" * 16), ("schema", 0)):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(finished, out)
        whose = json.loads((out / store.ABOUT).read_text())
        (out / store.ABOUT).write_text(json.dumps(whose | {name: value}))
        assert main(words(tiny_folder, out)) == 2
        assert f"another version ({name} " in capsys.readouterr().err
        assert (out / store.RESULTS).read_bytes() == (finished / store.RESULTS).read_bytes()
    assert main(["report", str(out)]) == 2
    assert "schema 0" in capsys.readouterr().err
    assert main(["claims", str(tmp_path)]) == 2
    assert "no results.jsonl" in capsys.readouterr().err


def test_a_group_leaves_out_what_has_no_data():
    here, absent = tasks.named(["ppl", "gsm"], Data(None))
    assert [task.name for task in here] == ["ppl_books", "gsm_synth"]
    assert {task.name for task in absent} == {"ppl_wikitext", "gsm8k_nll", "gsm8k_numbers"}


def test_tasks_are_listed_with_the_length_they_need(capsys):
    assert main(["tasks"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ruler +vt +from +1024 tokens", out)
    ruler = [task.name for task in tasks.tasks().values() if task.group == "ruler"]
    assert len(ruler) == 14  # RULER's thirteen, and the twin of its two-hop questions
