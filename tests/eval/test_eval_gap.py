"""The table of gaps closed: which rows are compared, and the shares, from made-up rows."""

from __future__ import annotations

import math

from kvjax.eval import report
from kvjax.eval.store import Row
from kvjax.eval.table import Results


def row(policy: str, nll: float, peak: float, length: int = 512, mean: float | None = None) -> Row:
    cell = {"policy": policy, "task": "ppl", "length": length, "seed": 0, "samples": 8, "protocol": "either"}
    each = {"nll": [nll] * 8, "tokens": [256.0] * 8}
    return {
        "cell": cell,
        "metric": "perplexity",
        "perplexity": math.exp(nll),
        "each": each,
        "mean_fraction": peak / 4e6 if mean is None else mean,
        "bytes": {"peak_live": peak, "full": 4e6},
    }


def test_a_policy_is_compared_with_the_window_of_its_bytes_and_no_other():
    full, near, far = row("full", 2.0, 4e6), row("window(128)", 3.0, 1e6), row("window(59)", 4.0, 5e5)
    better, worse = row("snapkv + pyramid(88)", 2.2, 1.015e6), row("conf_kv + confidence(1, 2)", 3.1, 9.9e5)
    other = row("window(128)", 3.0, 1e6, length=1024)
    lines = report.closed(Results((full, near, far, better, worse, other))).splitlines()[2:]
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    assert [x[0] for x in cells] == ["`snapkv + pyramid(88)`", "`conf_kv + confidence(1, 2)`"]
    assert {(x[1], x[2], x[3]) for x in cells} == {("`window(128)`", "ppl", "512")}
    gap = math.exp(3) - math.exp(2)
    for line, nll in zip(cells, (2.2, 3.1)):
        share = f"{100 * (math.exp(3) - math.exp(nll)) / gap:.0f}"
        assert line[-1] == f"{share} ({share} … {share})"
    assert cells[0][4:9] == ["peak bytes", "991 / 977", "9.0", "20.1", "7.4"]


def test_nothing_is_said_without_a_window_or_a_full_cache():
    assert report.closed(Results((row("full", 2.0, 4e6), row("snapkv + uniform(88)", 2.2, 1e6)))) == ""
    assert report.closed(Results((row("window(128)", 3.0, 1e6), row("snapkv + uniform(8)", 2.2, 1e6)))) == ""


def test_a_budget_that_moves_is_compared_by_its_mean_too():
    full, window = row("full", 2.0, 4e6), row("window(75)", 3.0, 6e5, mean=0.2)
    moves, grows = row("conf_kv + confidence(1, 2)", 2.5, 1e6, mean=0.203), row("random", 2.5, 1e6, mean=0.21)
    lines = report.closed(Results((full, window, moves, grows))).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["`conf_kv + confidence(1, 2)`"]
    assert lines[0].split("|")[5].strip() == "mean slots"
