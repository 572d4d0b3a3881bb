"""The command from end to end on a tiny random model: rows, resuming, pairing, reports, claims, bad input."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import quick_compiles  # noqa: F401

from kvjax.compose import policy as parse
from kvjax.eval import cells, figures, judges, match, plotting, report, runner, store, table, tasks
from kvjax.eval import claims as claims_module
from kvjax.eval.__main__ import main
from kvjax.eval.data import Data
from kvjax.eval.table import Results
from kvjax.learned import save_weights
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


def test_learned_weights_go_with_the_policy_and_into_the_row(tiny_folder, tmp_path, capsys):
    """Shut gates keep the window alone; the same policy with other gates is another cell."""
    model, name, out = load(tiny_folder), "write_gate(0.5, window=24)", tmp_path / "out"
    part = parse(name).admission
    layers = part.example_weights(jax.random.key(0), model.network)
    said = {}
    for file, logit in (("shut", -50.0), ("open", 50.0)):
        gates = tmp_path / f"{file}.safetensors"
        moved = [layer | {"w2": 0 * layer["w2"], "b2": 0 * layer["b2"] + logit} for layer in layers]
        save_weights(gates, model, part.learns, moved, notes={"window": 24 if file == "shut" else 32})
        said[file] = f"{file}@{hashlib.sha256(gates.read_bytes()).hexdigest()[:16]}"
    given = ["run", "--task", "niah", "--model", str(tiny_folder), "--lengths", str(LENGTH)]
    given += ["--samples", str(SAMPLES), "--out", str(out)]
    assert main([*given, "--policy", name, "--gates", str(tmp_path / "shut.safetensors")]) == 0
    assert "note:" not in capsys.readouterr().err  # the window these were trained with
    full, shut = store.read(out)
    assert (full["cell"]["gates"], shut["cell"]["gates"]) == ("", said["shut"])
    assert shut["kept_fraction"] == pytest.approx(24 / (full["bytes"]["full"] / 256), rel=0.02)
    assert set(shut["example"]["held"][:100]) == {0}
    assert (shut["switches"]["compress_at"], shut["switches"]["prefill_attention"]) == ("write", "policy")
    assert table.name(shut) == f"{name} [shut]"
    task = tasks.tasks()["niah"]
    plan = cells.plan([task], [parse(name)], lengths=[LENGTH], seeds=[0], samples=1, asked=("agnostic",))
    plan = cells.gated(plan, model, str(tmp_path / "open.safetensors"))
    assert [cell.gates for cell in plan.cells] == ["", said["open"]]
    (remark,) = plan.remarks
    assert "open.safetensors were trained with window=32 and are read with window=24" in remark
    weights = plan.weights[plan.cells[1].policy, said["open"]]
    assert float(weights["admission"][0]["b2"][0]) == 50
    assert main([*given, "--policy", name]) == 2
    assert "ships none" in capsys.readouterr().err


def test_jobs_are_joined_so_that_samples_are_drawn_once():
    both = [tasks.tasks()[name] for name in ("niah", "mqar")]

    def plan(*policies, lengths=(1024, 512)):
        chosen = [parse(policy) for policy in policies]
        return cells.plan(both, chosen, lengths=lengths, seeds=[0], samples=1, asked=("agnostic",))

    joined = cells.joined([plan("window(9)"), plan("window(8)"), plan(lengths=(512,))])
    found = [(cell.length, cell.task, cell.policy) for cell in joined.cells]
    policies = ("full", "window(9)", "window(8)")
    assert found == [(n, task, p) for n in (512, 1024) for task in ("niah", "mqar") for p in policies]


def test_a_report_shows_every_policy(finished, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(finished), "--to", str(tmp_path)]) == 0
    named = {Path(line).name for line in capsys.readouterr().out.split()}
    assert named == {"report.md", "report.html", "bytes.png", "heads.png", "depth.png", "text.png"}
    told = (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    for policy in ("full", "window(160)", "snapkv(8) + uniform(0.25), aware"):
        assert f"`{policy}`" in told
        assert f"<code>{policy}</code>" in page
    assert "niah 384, %" in told
    assert "\\*" in told  # not informative
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in re.sub(r"https://arxiv\S+", "", page)  # nothing is fetched
    rows = store.read(finished)
    streams = page.count('title="4 of 4"')
    assert streams >= sum(held == 4 for row in rows[1:] for held in row["example"]["held"][:300]) // 2 > 0
    assert all(
        (tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("bytes", "heads", "depth", "text")
    )


def test_a_report_s_numbers_are_the_rows_s(finished):
    draw = np.random.default_rng(0)  # a random model scores nothing: these are told apart
    rows = [r | {"each": r["each"] | {"score": draw.random(SAMPLES).tolist()}} for r in store.read(finished)]
    results = Results(tuple(rows))
    told = report.text(results)
    score, cost = ({} for _ in range(2))
    for part, found in (("## niah", score), ("## What was held and read", cost)):
        for line in told.split(part)[1].split("## ")[0].strip().splitlines()[2:]:
            name, *values = (x.strip() for x in line.strip("|").split("|"))
            found[name.strip("`")] = values
    assert list(score) == list(cost) == [table.name(row) for row in results.rows]
    for row in results.rows:
        name, mean = table.name(row), np.mean(row["each"]["score"])
        assert score[name][0].startswith(f"{100 * mean:.1f}\\* (")
        assert cost[name][:4] == [str(LENGTH)] + [
            f"{100 * row[f'{which}_fraction']:.1f}" for which in ("kept", "peak", "mean")
        ]
        sizes = [row["bytes"][size] / 1024 for size in ("live", "allocated", "peak_allocated", "full")]
        assert cost[name][4:8] == [f"{size:.1f}" for size in sizes]
        seen = row["bytes"]["full"] / (2 * 2 * 2 * 8 * 4)  # K and V, 2 layers of 2 heads of 8 floats
        assert float(cost[name][8]) == pytest.approx(seen * row["mean_fraction"], rel=0.02)
        assert cost[name][9:11] == ["0.0", "0.0"]
        assert float(cost[name][11]) == pytest.approx(100 * np.mean(row["each"]["retention"]), abs=0.06)
    # A difference is of the same samples, and the report says it.
    full, window, *_ = results.rows
    apart = [x | {"informative": True} for x in (full, window)]
    (line,) = table.losses(Results(tuple(apart))).splitlines()[2:]
    mean = 100 * (np.mean(window["each"]["score"]) - np.mean(full["each"]["score"]))
    assert f"| {mean:+.2f} |" in line


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
        "reads_per_step": live,
        "reads": {"slots": live, "summary": 0.0, "selector": 0.0},
        "bytes": {"live": live, "peak_live": live, "full": 100.0},
        "each": {
            "score": scores,
            "nll": [1 - s for s in scores],
            "tokens": [1] * len(scores),
            "live": [live] * len(scores),
        },
    }


GOOD, BAD = [1.0] * 40, [0.0, 1.0] * 20


def test_methods_are_known_by_the_parts_of_their_presets(monkeypatch):
    def told(wanted, *policies):
        return [wanted(row(policy, GOOD, 1)) for policy in policies]

    snap = (
        "snapkv(32) + uniform(64) + sinks(4)",
        "snapkv(32) + ada(0.5)",
        "snapkv(32) + uniform(64) + int8(9)",
    )
    assert told(judges.only("snapkv"), *snap) == [True, False, False]
    assert told(judges.only("snapkv", "adakv"), *snap) == [True, True, False]
    assert told(judges.like("snapkv"), *snap) == [True, False, True]
    assert told(judges.like("snapkv", "int8"), *snap) == [False, False, True]
    assert told(judges.only("streaming-llm"), "window(9) + sinks(2)", "window(9)") == [True, True]
    assert told(judges.swapped("snapkv", "random"), "random + uniform(64)", "random + ada(64)") == [
        True,
        False,
    ]
    # A method nobody has written matches nothing, not even the full cache.
    for wanted in (judges.only("no-such"), judges.like("no-such"), judges.swapped("no-such", "random")):
        assert told(wanted, "full", *snap) == [False] * 4


def test_policies_that_differ_in_their_budget_alone_are_one_curve():
    curves = {
        "window(…) + sinks(4)": ("window(9) + sinks(4)", "window(130) + sinks(4)"),
        "duo(…) + sinks(4)": ("duo(0.25) + sinks(4) [duo]", "duo(0.5, window=64) + sinks(4) [duo]"),
        "write_gate(0.1, window=32)": ("write_gate(0.1, window=32) [a]", "write_gate(0.1, window=32) [b]"),
        "quest(…, dense=0)": ("quest(4, dense=0)", "quest(8, dense=0)"),
        "snapkv(32) + uniform(…) + int8(16)": ("snapkv(32) + uniform(0.25) + int8(16)",),
        "snapkv(16) + uniform(…) + int8(16)": ("snapkv(16) + uniform(64) + int8(16)",),
    }
    for said, policies in curves.items():
        assert {plotting.family(policy) for policy in policies} == {said}


def test_learned_policies_are_paired_at_matched_memory_and_nowhere_else():
    def learned(policy, gates, *rest):
        made = row(policy, *rest)
        return made | {"cell": made["cell"] | {"gates": f"{gates}@0"}}

    def pairs(*rows):
        lines = table.matched(Results((row("full", GOOD, 100), *rows))).splitlines()[2:]
        return [[x.strip() for x in line.strip("|").split("|")] for line in lines]

    mine, local = learned("write_gate(0.1)", "a", GOOD, 25), row("window(9)", BAD, 25.4)
    ((policy, against, *_, shares, scores, difference, interval, unit),) = pairs(mine, local)
    assert (policy, against) == ("`write_gate(0.1) [a]`", "`window(9)`")
    assert (shares, scores, difference, unit) == ("25.0 / 25.4", "100.0 / 50.0", "+50.0", "points")
    low, high = map(float, interval.split(" … "))
    assert 30 < low < 50 < high < 70
    duo = learned("duo(0.5)", "duo", BAD, 25.2)
    assert [found[:2] for found in pairs(mine, duo, local)] == [
        ["`write_gate(0.1) [a]`", "`duo(0.5) [duo]`"],
        ["`write_gate(0.1) [a]`", "`window(9)`"],
        ["`duo(0.5) [duo]`", "`window(9)`"],
    ]
    assert pairs(mine, learned("write_gate(0.1)", "b", BAD, 25)) == []  # two budgets of one method
    assert pairs(mine, row("window(9)", BAD, 26)) == []  # not the same bytes
    silent = [r | {"informative": False} for r in (mine, local)]
    assert pairs(*silent) == []
    assert pairs(row("snapkv", GOOD, 25), local) == []  # nothing learned
    assert table.matched(Results((local,))) == ""


def test_reads_have_a_picture_where_something_selects(finished, tmp_path):
    pytest.importorskip("matplotlib")
    rows = store.read(finished)
    assert "reads.png" not in {file.name for file in figures.draw(Results(tuple(rows)), tmp_path / "none")}
    quest = [
        rows[1] | {"cell": rows[1]["cell"] | {"policy": f"quest({n})"}, "reads_per_step": 16.0 * n}
        for n in (1, 4)
    ]
    results = Results((rows[0], *quest))
    assert "reads.png" in {file.name for file in figures.draw(results, tmp_path / "some")}


def test_judges_follow_the_rows():
    full = row("full", GOOD, 100)
    better = judges.better(judges.only("snapkv"), judges.only("random"))

    def judged(*rows, judge=better):
        return judge(Results((full, *rows))).verdict

    assert judged(row("snapkv + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 25.4)) == judges.HOLDS
    assert judged(row("snapkv + uniform(8)", BAD, 25), row("random + uniform(8)", GOOD, 25)) == judges.FAILS
    apart = (row("snapkv + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 26))
    assert judged(*apart) == judges.NOT_RUN
    silent = (row(f"{name} + uniform(8)", GOOD, 25, told=False) for name in ("snapkv", "random"))
    assert judged(*silent) == judges.SILENT
    other = row("snapkv + uniform(8)", GOOD, 25, protocol="aware")
    assert judged(other, row("random + uniform(8)", BAD, 25, protocol="agnostic")) == judges.NOT_RUN
    within = judges.within(judges.only("snapkv"), 1.0)
    assert judged(row("snapkv + uniform(8)", GOOD, 25), judge=within) == judges.HOLDS
    assert judged(row("snapkv + uniform(8)", BAD, 25), judge=within) == judges.FAILS
    assert table.quality(full) == GOOD


def test_pairs_are_matched_by_what_the_claim_says():
    a, b = row("snapkv + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 26)
    for name, judge in (("reads_per_step", judges.same_reads), ("reads", judges.same_slots)):
        b[name] = {"slots": 25.4, "summary": 9.0} if name == "reads" else 25.4
        found = judges.better(judges.only("snapkv"), judges.only("random"), judge)(Results((a, b)))
        assert found.verdict == judges.HOLDS
        assert found.ours.startswith("+50.0 points (+")
    assert not judges.same_bytes(a, b)


def test_bytes_are_compared_at_no_lower_score():
    full = row("full", GOOD, 100)
    small = judges.smaller(judges.only("gvote"), judges.only("snapkv"), 2.0)
    assert small(Results((full,))).verdict == judges.NOT_RUN  # there is no such method yet
    small = judges.smaller(judges.only("int8"), judges.only("snapkv"), 2.0)
    rivals = (row("snapkv + uniform(8)", BAD, 25), row("snapkv + uniform(9)", GOOD, 50))
    mine = row("int8", GOOD, 20)
    assert small(Results((full, mine, *rivals))) == judges.Verdict(
        "2.50× (2.50 … 2.50; 1 cells)", judges.HOLDS
    )
    assert small(Results((full, mine, rivals[0]))).ours.startswith("5.00×")  # nobody else is as good: full
    mine["each"]["live"] = [10.0, 42.0] * 20
    found = small(Results((full, mine, *rivals)))
    assert found.ours.startswith("1.92×")
    assert found.verdict == judges.FAILS


def test_perplexity_gaps_come_with_intervals_and_the_worst_cell_counts():
    def text(policy, nll, wave=0.0):
        made = row(policy, [0.0] * 10, 50)
        nlls = [nll + wave * (-1) ** i for i in range(10)]
        mean = float(np.mean(nlls))
        return made | {
            "metric": "perplexity",
            "perplexity": float(np.exp(mean)),
            "each": made["each"] | {"nll": nlls},
        }

    gap = judges.ppl_gap(judges.only("int8"), 0.34)
    full, mine = text("full", 3.0), text("int8", 3.01)
    assert gap(Results((full, mine))).verdict == judges.HOLDS
    assert gap(Results((full, text("int8", 3.03)))).verdict == judges.FAILS
    assert gap(Results((full, text("int8", 3.01, wave=0.1)))).verdict == judges.FAILS  # it might be worse
    beats = judges.better(judges.only("int8"), judges.only("random"), text=True)
    rows = (full, mine, text("random + uniform(8)", 3.2))
    assert beats(Results(rows)).ours.startswith("+0.190 nats a token")
    assert beats(Results(rows)).verdict == judges.HOLDS
    assert judges.better(judges.only("int8"), judges.only("random"))(Results(rows)).verdict == judges.NOT_RUN
    closed = judges.gap_closed(judges.only("pyramidkv"), judges.only("streaming-llm"), 0.5)
    rows = (text("full", 2.0), text("window(9)", 3.0), text("snapkv + pyramid(9)", 2.2))
    share = round(100 * (np.exp(3) - np.exp(2.2)) / (np.exp(3) - np.exp(2)))
    assert closed(Results(rows)).ours == f"{share} % ({share} … {share}; worst of 1 cells)"
    rows = (rows[0], rows[1], text("snapkv + pyramid(9)", 2.7, wave=0.2))
    assert closed(Results(rows)).verdict == judges.FAILS


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
        (["--gates", "nowhere"], ["--gates nowhere", "no policy of the run learns anything"]),
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


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"lengths": 512}, "lengths: 512 is no list of whole numbers, 64 or more"),
        ({"lengths": [5]}, "lengths: [5] is no list"),
        ({"policies": "full"}, "policies: 'full' is no list of names"),
        ({"samples": 0}, "samples: 0 is out of range"),
        ({"protocols": ["seen"]}, "protocols: ['seen']"),
        ({"jobs": [{"task": "niah"}]}, "cannot be used"),
    ],
)
def test_a_config_is_checked_word_by_word(job, says, tmp_path, capsys):
    grid = {"policies": ["int8"], "jobs": [{"lengths": [512], "tasks": ["niah"]}]}
    where = job if "jobs" in job else {"jobs": [grid["jobs"][0] | job]}
    (tmp_path / "grid.yaml").write_text(json.dumps(grid | where))  # JSON is YAML
    assert main(["run", "--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


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
