"""Claims: judged from rows and from what studies wrote; a claim that was not run says so."""

from __future__ import annotations

import json
from pathlib import Path

from eval_rows import GOOD, row

from kvjax.eval.measure import store
from studies import claims, judges

RESULTS = Path(__file__).parents[2] / "results"

STUDIES = {
    "roundtrip": {"errors": [{"storage": "int8", "mean": 0.005}, {"storage": "int4", "mean": 0.1}]},
    "premise": {"shifts": {"all": {"r": {"confidence": [-0.2, -0.3, -0.1]}}}},
    "costs": {
        "attention_free": ["random", "knorm"],
        "kinds": {"books": {"areas": {"default": [[2, 2], [1, 1]], "random": [[4, 4], [5, 5]],
                                      "knorm": [[3, 3], [9, 9]], "tova": [[1, 1], [1, 1]]}}},
    },
    "heads": {
        "correlation": [0.8, -0.1],
        "fewer": [{"alone": 2, "completed": 0.0}, {"alone": 160, "completed": 40}],
    },
    "proxy": {"overlap": 0.95},
}  # fmt: skip
"""What studies write, as far as claims read it."""


def test_claims_are_judged_from_what_studies_wrote(tmp_path, capsys):
    for name, tree in STUDIES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"study": name} | tree))
    (tmp_path / "other.json").write_text("[]")
    assert claims.main([str(tmp_path), "--json"]) == 0
    lines = {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    judged = {name: (line["ours"].split()[0], line["verdict"]) for name, line in lines.items()}
    assert judged["conf-kv/round-trip"] == ("0.500", judges.FAILS), "percent, and the paper has 0.38"
    assert judged["conf-kv/premise"] == ("-0.100", judges.HOLDS), "the interval's end"
    assert judged["kvp/cost"] == ("1.500", judges.HOLDS), "3 over 2 in the first layer; TOVA hears attention"
    assert judged["topk-phi/tokens"] == ("4.000", judges.HOLDS)
    assert judged["topk-phi/entropy"] == ("-0.100", judges.FAILS), "the worst count"
    assert judged["gvote/overlap"] == ("0.950", judges.HOLDS)


def test_claims_that_nobody_ran_say_so(tmp_path, capsys):
    (tmp_path / store.ABOUT).write_text(json.dumps({"schema": store.SCHEMA}))
    folder = store.Store(tmp_path)
    for policy in ("full", "window(160)", "snapkv(8) + uniform(0.25)"):
        folder.append(row(policy, GOOD))
    assert claims.main([str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(claims.CLAIMS)
    assert len({line["id"] for line in lines}) == len(lines)
    verdicts = {line["id"]: line["verdict"] for line in lines}
    for paper in ("wg-kv", "conf-kv", "kvp", "topk-phi", "gvote"):
        assert any(name.startswith(paper) for name in verdicts)
    assert verdicts["gvote/memory"] == judges.NOT_RUN
    assert verdicts["conf-kv/int8"] == judges.NOT_RUN
    assert claims.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == len(lines) + 2


SAID = {judges.HOLDS: "yes", judges.FAILS: "no", judges.SILENT: "not informative", judges.NOT_RUN: "not run"}


def test_the_page_says_every_verdict():
    """Of each claim in results/papers.md: the verdict that the results have."""
    said = {}
    for line in (RESULTS / "papers.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and "/" in cells[1]:
            said |= dict.fromkeys(cells[1].partition(":")[0].split(", "), cells[4])
    lines = (RESULTS / "claims" / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = {line["id"]: line["verdict"] for line in map(json.loads, lines)}
    assert set(said) == set(verdicts) == {claim.id for claim in claims.CLAIMS}
    for name, verdict in verdicts.items():
        first, of_best, _ = verdict.partition(", against the best baseline")
        word = SAID[next(word for word in SAID if first.startswith(word))]
        assert said[name].endswith(" only") if of_best else said[name] == word, name
    assert len((RESULTS / "papers.md").read_text(encoding="utf-8").split()) <= 1800


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert claims.main([str(tmp_path)]) == 2
    assert "no results.jsonl" in capsys.readouterr().err
