"""Judges of claims: made-up rows in, verdicts with their intervals out."""

from __future__ import annotations

import numpy as np
from eval_rows import BAD, GOOD, changed, row

from kvjax.eval.report import table
from kvjax.eval.report.table import Results
from studies import judges


def test_methods_are_known_by_the_parts_of_their_presets():
    def passed(wanted, *policies):
        return [wanted(row(policy, GOOD, 1)) for policy in policies]

    snap = (
        "snapkv(32) + uniform(64) + sinks(4)",
        "snapkv(32) + ada(0.5)",
        "snapkv(32) + uniform(64) + int8(9)",
    )
    assert passed(judges.only("snapkv"), *snap) == [True, False, False]
    assert passed(judges.only("snapkv", "adakv"), *snap) == [True, True, False]
    assert passed(judges.like("snapkv"), *snap) == [True, False, True]
    assert passed(judges.like("snapkv", "int8"), *snap) == [False, False, True]
    assert passed(judges.only("streaming-llm"), "window(9) + sinks(2)", "window(9)") == [True, True]
    assert passed(judges.swapped("snapkv", "random"), "random + uniform(64)", "random + ada(64)") == [
        True,
        False,
    ]
    # A method nobody has written matches nothing, not even the full cache.
    for wanted in (judges.only("no-such"), judges.like("no-such"), judges.swapped("no-such", "random")):
        assert passed(wanted, "full", *snap) == [False] * 4


def test_judges_follow_the_rows():
    full = row("full", GOOD, 100)
    better = judges.better(judges.only("snapkv"), judges.only("random"))

    def judged(*rows, judge=better):
        return judge(Results((full, *rows))).verdict

    assert (
        judged(row("snapkv(4) + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 25.4)) == judges.HOLDS
    )
    assert (
        judged(row("snapkv(4) + uniform(8)", BAD, 25), row("random + uniform(8)", GOOD, 25)) == judges.FAILS
    )
    apart = (row("snapkv(4) + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 26))
    assert judged(*apart) == judges.NOT_RUN
    silent = (row(f"{name} + uniform(8)", GOOD, 25, told=False) for name in ("snapkv(4)", "random"))
    assert judged(*silent) == judges.SILENT
    other = row("snapkv(4) + uniform(8)", GOOD, 25, protocol="aware")
    assert judged(other, row("random + uniform(8)", BAD, 25, protocol="agnostic")) == judges.NOT_RUN
    within = judges.within(judges.only("snapkv"), 1.0)
    assert judged(row("snapkv(4) + uniform(8)", GOOD, 25), judge=within) == judges.HOLDS
    assert judged(row("snapkv(4) + uniform(8)", BAD, 25), judge=within) == judges.FAILS
    assert table.quality(full) == GOOD


def test_pairs_are_matched_by_what_the_claim_says():
    a, b = row("snapkv(4) + uniform(8)", GOOD, 25), row("random + uniform(8)", BAD, 26)
    for name, judge in (("reads_per_step", judges.same_reads), ("reads", judges.same_slots)):
        near = changed(b, **{name: {"slots": 25.4, "summary": 9.0} if name == "reads" else 25.4})
        verdict = judges.better(judges.only("snapkv"), judges.only("random"), judge)(Results((a, near)))
        assert verdict.verdict == judges.HOLDS
        assert verdict.ours.startswith("+50.0 points (+")
    assert not judges.same_bytes(a, b)


def test_bytes_are_compared_at_no_lower_score():
    full = row("full", GOOD, 100)
    small = judges.smaller(judges.only("gvote"), judges.only("snapkv"), 2.0)
    assert small(Results((full,))).verdict == judges.NOT_RUN  # there is no such method yet
    small = judges.smaller(judges.only("int8"), judges.only("snapkv"), 2.0)
    rivals = (row("snapkv(4) + uniform(8)", BAD, 25), row("snapkv(4) + uniform(9)", GOOD, 50))
    int8 = row("int8", GOOD, 20)
    assert small(Results((full, int8, *rivals))) == judges.Verdict(
        "2.50× (2.50 … 2.50; 1 cells)", judges.HOLDS
    )
    assert small(Results((full, int8, rivals[0]))).ours.startswith("5.00×")  # nobody else is as good: full
    int8 = changed(int8, each={"live": [10.0, 42.0] * 20})
    verdict = small(Results((full, int8, *rivals)))
    assert verdict.ours.startswith("1.92×")
    assert verdict.verdict == judges.FAILS


def test_perplexity_gaps_come_with_intervals_and_the_worst_cell_counts():
    def text(policy, nll, wave=0.0):
        nlls = [nll + wave * (-1) ** i for i in range(10)]
        perplexity = float(np.exp(np.mean(nlls)))
        shown = row(policy, [0.0] * 10, 50)
        return changed(shown, metric="perplexity", perplexity=perplexity, each={"nll": nlls})

    gap = judges.ppl_gap(judges.only("int8"), 0.34)
    full, int8 = text("full", 3.0), text("int8", 3.01)
    assert gap(Results((full, int8))).verdict == judges.HOLDS
    assert gap(Results((full, text("int8", 3.03)))).verdict == judges.FAILS
    assert gap(Results((full, text("int8", 3.01, wave=0.1)))).verdict == judges.FAILS  # it might be worse
    beats = judges.better(judges.only("int8"), judges.only("random"), text=True)
    rows = (full, int8, text("random + uniform(8)", 3.2))
    assert beats(Results(rows)).ours.startswith("+0.190 nats a token")
    assert beats(Results(rows)).verdict == judges.HOLDS
    assert judges.better(judges.only("int8"), judges.only("random"))(Results(rows)).verdict == judges.NOT_RUN
    closed = judges.gap_closed(judges.only("pyramidkv"), judges.only("streaming-llm"), 0.5)
    rows = (text("full", 2.0), text("window(9)", 3.0), text("snapkv(4) + pyramid(9)", 2.2))
    share = round(100 * (np.exp(3) - np.exp(2.2)) / (np.exp(3) - np.exp(2)))
    assert closed(Results(rows)).ours == f"{share} % ({share} … {share}; worst of 1 cells)"
    rows = (rows[0], rows[1], text("snapkv(4) + pyramid(9)", 2.7, wave=0.2))
    assert closed(Results(rows)).verdict == judges.FAILS


def test_a_method_is_compared_with_the_best_baseline_of_each_cell():
    """Weak rivals do not carry a strong one; the best of all is named even where the claim names another."""
    half, third = [0.0, 1.0] * 20, [1.0, 0.0, 0.0, 1.0] * 10
    rows = (
        row("full", GOOD, 100),
        row("kvp(4) + uniform(64)", half, 25),
        row("knorm + uniform(64)", [0.0] * 40, 25),
        row("random + uniform(64)", [0.0] * 40, 25),
        row("keydiff + uniform(64)", third, 25),
        row("snapkv(32) + uniform(64)", GOOD, 25),
        row("kvzip + overall(64)", GOOD, 25),  # attends in its second pass
        row("gvote(0.9)", GOOD, 25),  # no baseline: another paper's own
    )
    free = judges.better(judges.only("kvp"), judges.attention_free)
    verdict = free(Results(rows))
    difference = "+0.0 points"
    assert verdict.ours.startswith(difference), "keydiff alone counts, not the mean of three"
    assert "1 cells, not behind in 1, n = 40; one task, niah" in verdict.ours
    assert "against the best baseline -50.0 points (" in verdict.ours
    assert verdict.verdict == judges.FAILS
    weak = judges.better(judges.only("kvp"), judges.only("knorm"))(Results(rows))
    assert weak.ours.startswith("+50.0 points")
    assert weak.verdict == "holds, against the best baseline it does not"
    alone = judges.better(judges.only("kvp"), judges.only("knorm"))(Results(rows[:3]))
    assert alone.verdict == judges.HOLDS
    assert "best baseline" not in alone.ours


def test_every_cell_has_its_own_best():
    def at(length, policy, scores):
        shown = row(policy, scores, 25, length=length)
        return changed(shown, cell={"length": length, "task": f"task{length}"})

    rows = [at(n, "kvp(4) + uniform(64)", BAD) for n in (512, 1024)]
    rows += [at(512, "knorm + uniform(64)", GOOD), at(512, "keydiff + uniform(64)", BAD)]
    rows += [at(1024, "knorm + uniform(64)", [0.0] * 40), at(1024, "keydiff + uniform(64)", BAD)]
    verdict = judges.better(judges.only("kvp"), judges.attention_free)(Results(tuple(rows)))
    assert verdict.ours.startswith("-25.0 points")
    assert "2 cells, not behind in 1, n = 80)" in verdict.ours
