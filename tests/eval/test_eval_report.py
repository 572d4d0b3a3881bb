"""Reports: every policy is shown, and the numbers are those of the rows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from eval_rows import BAD, GOOD, LENGTH, SAMPLES, changed, row

from kvjax.catalogue import describe
from kvjax.catalogue import policy as parse
from kvjax.eval.__main__ import main
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import store
from kvjax.eval.report import figures, markdown, table
from kvjax.eval.report.table import Results

pytestmark = pytest.mark.usefixtures("no_pack")


@pytest.mark.slow
def test_a_report_shows_every_policy(finished, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(finished), "--to", str(tmp_path)]) == 0
    named = {Path(line).name for line in capsys.readouterr().out.split()}
    assert named == {"report.md", "report.html", "bytes.png", "heads.png", "depth.png"}
    report = (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    for policy in ("full", "window(160)", "snapkv(8) + uniform(0.25), aware"):
        assert f"`{policy}`" in report
        assert f"<code>{policy}</code>" in page
    assert "niah 384, %" in report
    assert "\\*" in report  # not informative
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in re.sub(r"https://arxiv\S+", "", page)  # nothing is fetched
    rows = store.read(finished)
    streams = page.count('title="4 of 4"')
    assert streams >= sum(held == 4 for row in rows[1:] for held in row.example.held[:300]) // 2 > 0
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("bytes", "heads", "depth"))


def test_without_matplotlib_a_report_has_tables_and_a_note(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert main(["report", str(finished), "--to", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert [Path(line).name for line in printed.out.split()] == ["report.md", "report.html"]
    assert printed.err.startswith("note: written without pictures.")
    assert printed.err.endswith("pip install -e '.[plot]'\n")
    assert "| `full` |" in (tmp_path / "report.md").read_text()
    assert "<img" not in (tmp_path / "report.html").read_text()
    with pytest.raises(EvalError, match="need matplotlib"):
        figures.draw(Results(tuple(store.read(finished))), tmp_path)


def test_a_report_s_numbers_are_the_rows_s(finished):
    draw = np.random.default_rng(0)  # a random model scores nothing: these are told apart
    rows = [changed(r, each={"score": draw.random(SAMPLES).tolist()}) for r in store.read(finished)]
    results = Results(tuple(rows))
    report = markdown.text(results)
    score, cost = ({} for _ in range(2))
    for part, columns in (("## niah", score), ("## What was held and read", cost)):
        for line in report.split(part)[1].split("## ")[0].strip().splitlines()[2:]:
            name, *values = (x.strip() for x in line.strip("|").split("|"))
            columns[name.strip("`")] = values
    assert list(score) == list(cost) == [table.name(row) for row in results.rows]
    for one in results.rows:
        name, mean = table.name(one), np.mean(one.each.score)
        assert score[name][0].startswith(f"{100 * mean:.1f}\\* (")
        assert cost[name][:4] == [str(LENGTH)] + [
            f"{100 * getattr(one, f'{which}_fraction'):.1f}" for which in ("kept", "peak", "mean")
        ]
        sizes = [getattr(one.bytes, size) / 1024 for size in ("live", "allocated", "peak_allocated", "full")]
        assert cost[name][4:8] == [f"{size:.1f}" for size in sizes]
        seen = one.bytes.full / (2 * 2 * 2 * 8 * 4)  # K and V, 2 layers of 2 heads of 8 floats
        assert float(cost[name][8]) == pytest.approx(seen * one.mean_fraction, rel=0.02)
        assert cost[name][9:11] == ["0.0", "0.0"]
        assert float(cost[name][11]) == pytest.approx(100 * np.mean(one.each.retention), abs=0.06)
    # A difference is of the same samples, and the report says it.
    full, window, *_ = results.rows
    apart = [changed(x, informative=True) for x in (full, window)]
    (line,) = table.losses(Results(tuple(apart))).splitlines()[2:]
    mean = 100 * (np.mean(window.each.score) - np.mean(full.each.score))
    assert f"| {mean:+.2f} |" in line


def test_policies_that_differ_in_their_budget_alone_are_one_curve():
    """Gates make no other curve, the protocol does."""
    curves = {
        "window(…) + sinks(4)": ("window(9) + sinks(4)", "window(130) + sinks(4)"),
        "write_gate(0.1, window=32)": ("write_gate(0.1, window=32)",),
        "quest(…, dense=0)": ("quest(4, dense=0)", "quest(8, dense=0)"),
    }
    for name, policies in curves.items():
        rows = [row(policy, GOOD, weights=gates) for policy in policies for gates in ("", "a@0", "b@1")]
        assert {table.family(one) for one in rows} == {name}
        aware = [row(policy, GOOD, protocol="aware") for policy in policies]
        assert {table.family(one) for one in aware} == {f"{name}, aware"}


def test_learned_policies_are_paired_at_matched_memory_and_nowhere_else():
    def learned(policy, gates, *rest):
        return row(policy, *rest, weights=f"{gates}@0")

    def pairs(*rows):
        lines = table.matched(Results((row("full", GOOD, 100), *rows))).splitlines()[2:]
        return [[x.strip() for x in line.strip("|").split("|")] for line in lines]

    gated, local = learned("write_gate(0.1)", "a", GOOD, 25), row("window(9)", BAD, 25.4)
    ((policy, against, *_, shares, scores, difference, interval, unit),) = pairs(gated, local)
    assert (policy, against) == ("`write_gate(0.1) [a]`", "`window(9)`")
    assert (shares, scores, difference, unit) == ("25.0 / 25.4", "100.0 / 50.0", "+50.0", "points")
    low, high = map(float, interval.split(" … "))
    assert 30 < low < 50 < high < 70
    duo = learned("duo(0.5)", "duo", BAD, 25.2)
    assert [cells[:2] for cells in pairs(gated, duo, local)] == [
        ["`write_gate(0.1) [a]`", "`duo(0.5) [duo]`"],
        ["`write_gate(0.1) [a]`", "`window(9)`"],
        ["`duo(0.5) [duo]`", "`window(9)`"],
    ]
    assert pairs(gated, learned("write_gate(0.1)", "b", BAD, 25)) == []  # two budgets of one method
    assert pairs(gated, row("window(9)", BAD, 26)) == []  # not the same bytes
    silent = [changed(r, informative=False) for r in (gated, local)]
    assert pairs(*silent) == []
    assert pairs(row("snapkv", GOOD, 25), local) == []  # nothing learned
    assert table.matched(Results((local,))) == ""


def test_reads_have_a_picture_where_something_selects(finished, tmp_path):
    pytest.importorskip("matplotlib")
    rows = store.read(finished)
    assert "reads.png" not in {file.name for file in figures.draw(Results(tuple(rows)), tmp_path / "none")}
    quest = [
        changed(rows[1], cell={"policy": spec}, policy=describe(parse(spec)), reads_per_step=reads)
        for spec, reads in (("quest(1)", 16.0), ("quest(4)", 64.0))
    ]
    results = Results((rows[0], *quest))
    assert "reads.png" in {file.name for file in figures.draw(results, tmp_path / "some")}
