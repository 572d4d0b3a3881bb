"""The table of gaps closed: which rows are compared, and the shares, from made-up rows."""

from __future__ import annotations

import math

from eval_rows import changed, row

from kvjax.eval.measure.row import Row
from kvjax.eval.report import markdown
from kvjax.eval.report.table import Results


def text(policy: str, nll: float, peak: float, length: int = 512, mean: float | None = None) -> Row:
    return changed(
        row(policy, [0.0] * 8, peak, length=length),
        metric="perplexity",
        perplexity=math.exp(nll),
        each={"nll": [nll] * 8, "tokens": [256] * 8},
        mean_fraction=peak / 4e6 if mean is None else mean,
    )


def test_a_policy_is_compared_with_the_window_of_its_bytes_and_no_other():
    full, near, far = text("full", 2.0, 4e6), text("window(128)", 3.0, 1e6), text("window(59)", 4.0, 5e5)
    better, worse = (
        text("snapkv + pyramid(88)", 2.2, 1.015e6),
        text("conf_kv + confidence(65, 130)", 3.1, 9.9e5),
    )
    other = text("window(128)", 3.0, 1e6, length=1024)
    lines = markdown.closed(Results((full, near, far, better, worse, other))).splitlines()[2:]
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    assert [x[0] for x in cells] == ["`snapkv + pyramid(88)`", "`conf_kv + confidence(65, 130)`"]
    assert {(x[1], x[2], x[3]) for x in cells} == {("`window(128)`", "niah", "512")}
    gap = math.exp(3) - math.exp(2)
    for line, nll in zip(cells, (2.2, 3.1)):
        share = f"{100 * (math.exp(3) - math.exp(nll)) / gap:.0f}"
        assert line[-1] == f"{share} ({share} … {share})"
    assert cells[0][4:9] == ["peak bytes", "991 / 977", "9.0", "20.1", "7.4"]


def test_nothing_is_said_without_a_window_or_a_full_cache():
    full, window, policy = text("full", 2.0, 4e6), text("window(128)", 3.0, 1e6), text("snapkv", 2.2, 1e6)
    assert markdown.closed(Results((full, policy))) == ""
    assert markdown.closed(Results((window, policy))) == ""
    assert markdown.closed(Results((full, window, policy))) != ""


def test_a_budget_that_moves_is_compared_by_its_mean_too():
    full, window = text("full", 2.0, 4e6), text("window(75)", 3.0, 6e5, mean=0.2)
    moves = text("conf_kv + confidence(65, 130)", 2.5, 1e6, mean=0.203)
    grows = text("random", 2.5, 1e6, mean=0.21)
    lines = markdown.closed(Results((full, window, moves, grows))).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["`conf_kv + confidence(65, 130)`"]
    assert lines[0].split("|")[5].strip() == "mean slots"
