"""Which rows are one method over lengths, and what it is called."""

from __future__ import annotations

from eval_rows import GOOD
from eval_rows import row as made_up

from kvjax.eval.measure.row import Row
from kvjax.eval.report import figures


def row(policy: str, length: int, protocol: str = "aware") -> Row:
    return made_up(policy, GOOD, length=length, protocol=protocol)


def test_budgets_that_follow_the_length_are_one_method():
    rows = [row("full", n, "either") for n in (256, 512)]
    for n in (256, 512):
        rows += [row(f"snapkv({n // 16}) + uniform({n // 4})", n), row(f"window({n // 4}, prefill=False)", n)]
        rows += [row(f"snapkv({n // 16}, kernel=13) + uniform({n // 4})", n)]
    methods = figures.methods(rows)
    assert list(methods) == [
        "full",
        "snapkv(…) + uniform(…), aware",
        "window(…, prefill=False), aware",
        "snapkv(…, kernel=13) + uniform(…), aware",
    ]
    assert all([r.cell.length for r in own] == [256, 512] for own in methods.values())
    assert sum(map(len, methods.values())) == len(rows)


def test_policies_that_are_there_at_several_lengths_stay_apart():
    rows = [row(f"window({w})", n) for n in (256, 512) for w in (32, 64)] + [row("window(128)", 512)]
    assert list(figures.methods(rows)) == ["window(32), aware", "window(64), aware", "window(128), aware"]


def test_protocols_stay_apart_and_a_default_that_is_not_written_is_no_other_method():
    rows = [row("conf_kv(0.5, recent=16) + confidence(32, loose=64)", 256, p) for p in ("aware", "agnostic")]
    rows += [row("conf_kv(0.5) + confidence(256)", 2048, p) for p in ("aware", "agnostic")]
    assert list(figures.methods(rows)) == [
        f"conf_kv(0.5, recent=…) + confidence(…, loose=…), {protocol}" for protocol in ("aware", "agnostic")
    ]


def test_several_at_one_length_keep_their_order():
    rows = [
        row("h2o(1) + uniform(8)", 256),
        row("h2o(2) + uniform(16)", 256),
        row("h2o(4) + uniform(32)", 512),
    ]
    methods = figures.methods(rows)
    assert list(methods) == ["h2o(…) + uniform(…), aware", "h2o(2) + uniform(16), aware"]
