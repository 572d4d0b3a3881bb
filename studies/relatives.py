"""Each method beside its nearest relatives at the same bytes: the tables of results/relatives.

python -m studies.relatives --out results/relatives

Rows are those of ``configs/eval/relatives.yaml``. Intervals are 95 %, pair by pair on the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvjax import cli
from kvjax.eval.measure.row import Row
from kvjax.eval.measure.store import read
from kvjax.eval.report import stats, table
from kvjax.eval.report.table import FULL, Results

PROTOCOLS = ("agnostic", "aware")
"""The question unseen and seen while the cache is cut."""

_SNAPKV, _EXPECTED = "snapkv(16)", "expected_attention(512)"

PAIRS = (
    (f"{_SNAPKV} + critical(0.5) + uniform(0.25) + sinks(4)", f"{_SNAPKV} + uniform(0.25) + sinks(4)"),
    (f"{_SNAPKV} + critical(0.5) + ada(0.25) + sinks(4)", f"{_SNAPKV} + ada(0.25) + sinks(4)"),
    (
        f"{_EXPECTED} + critical(0.5) + uniform(0.25) + sinks(4) + recent(16)",
        f"{_EXPECTED} + uniform(0.25) + sinks(4) + recent(16)",
    ),
    (f"{_SNAPKV} + chunks(20) + uniform(0.25) + sinks(4)", f"{_SNAPKV} + uniform(0.25) + sinks(4)"),
    (f"{_SNAPKV} + entropy_chunks(10) + uniform(0.25) + sinks(4)", f"{_SNAPKV} + uniform(0.25) + sinks(4)"),
    ("kvzap(-5.5, window=32) + sinks(4)", "write_gate(0.1, window=32) + sinks(4)"),
    ("kvzip(2048, output=True) + overall(0.1)", "kvzip(2048) + overall(0.1)"),
    ("kvzip(2048) + uniform(0.1)", "kvzip(2048) + overall(0.1)"),
    ("fast_kvzip(4) + overall(0.1)", "kvzip(2048) + overall(0.1)"),
    ("fast_kvzip(4) + uniform(0.1) + recent(32)", "kvzip(2048) + uniform(0.1)"),
    ("kvzap_scores + ada(0.1) + sinks(4) + recent(32)", "kvzip(2048) + overall(0.1)"),
    ("fast_kvzip(4) + overall(0.1)", "kvp(4) + uniform(0.1)"),
    ("fast_kvzip(4) + uniform(0.1) + recent(32)", "kvp(4) + uniform(0.1)"),
    ("fast_kvzip(4) + overall(0.25)", "kvp(4) + uniform(0.25)"),
    ("fast_kvzip(4) + uniform(0.25) + recent(32)", "kvp(4) + uniform(0.25)"),
    ("kvp(4) + uniform(0.1)", "kvzip(2048) + uniform(0.1)"),
    ("trim_kv + uniform(0.1) + sinks(4) + recent(16)", "kvp(4) + uniform(0.1)"),
    (
        "leverage(48) + uniform(0.1) + sinks(4) + recent(16)",
        "keydiff + uniform(0.1) + sinks(4) + recent(16)",
    ),
    (
        "compactor(0.5) + uniform(0.1) + sinks(4) + recent(16)",
        "leverage(48) + uniform(0.1) + sinks(4) + recent(16)",
    ),
    ("cur(16) + uniform(0.1) + sinks(4) + recent(16)", "leverage(48) + uniform(0.1) + sinks(4) + recent(16)"),
    ("int4(32, hadamard=True)", "int4(32)"),
    ("kivi(4)", "int4(32)"),
    ("kivi(2)", "kivi(4)"),
    ("fp8(32)", "int8(32)"),
    ("fp8(32, hadamard=True)", "fp8(32)"),
)
"""Policies, each with the one it is judged against."""


def _cell(row: Row) -> str:
    if row.metric == "perplexity":
        return f"{table.value(row):.2f}"
    mean, low, high = stats.interval(row.each.score)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _asked(row: Row) -> str:
    return {"agnostic": ", unseen", "aware": ", seen"}.get(row.cell.protocol, "")


def scores(results: Results, task: str) -> str:
    """A line a policy: kept tokens and the score in both protocols, best first."""
    lines: dict[str, list[tuple[float, str, str]]] = {}
    for row in results.where(lambda row: row.cell.task == task):
        for protocol in PROTOCOLS if row.cell.protocol == "either" else (row.cell.protocol,):
            cells = lines.setdefault(row.cell.policy, [(0.0, "", "")] * len(PROTOCOLS))
            kept = f"{100 * row.kept_fraction:.0f} %"
            cells[PROTOCOLS.index(protocol)] = (table.value(row), kept, _cell(row))
    order = sorted(lines, key=lambda policy: -sum(cell[0] for cell in lines[policy]))
    head = ("policy", "held, unseen", "seen", "right, unseen, %", "seen, %")
    body = [(f"`{policy}`", *(cell[at] for at in (1, 2) for cell in lines[policy])) for policy in order]
    return table.markdown(head, body)


def _rival(results: Results, row: Row, policy: str) -> Row:
    """The row of another policy on the same samples, asked in the same way where that matters to both."""
    rivals = results.where(lambda r: r.cell.policy == policy and r.cell.drawn == row.cell.drawn)
    return next(r for r in rivals if _asked(r) in ("", _asked(row)) or not _asked(row))


def pairs(results: Results) -> str:
    """A line a pair and cell: how much better the first is, and the bytes of the two."""
    lines = []
    for mine, other in PAIRS:
        for row in results.where(lambda row, mine=mine: row.cell.policy == mine):  # type: ignore[misc]
            rival = _rival(results, row, other)
            scale = 1 if row.metric == "perplexity" else 100
            values = table.quality(row), table.quality(rival), table.weights(row)
            mean, low, high = (scale * x for x in stats.difference(*values))
            verdict = "better" if low > 0 else "worse" if high < 0 else "no difference seen"
            lines.append(
                (
                    f"`{mine}`",
                    f"`{other}`",
                    f"{row.cell.task}{_asked(row) or _asked(rival)}",
                    f"{row.bytes.live / rival.bytes.live:.2f}",
                    f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]",
                    verdict,
                )
            )
    head = ("method", "against", "cell", "bytes held, ratio", "points (nats of books)", "verdict")
    return table.markdown(head, lines)


def page(results: Results) -> str:
    """The page of the folder."""
    tasks = [task for _, task, _ in results.columns() if task != "text_books"]
    parts = [f"## {task}\n\n{scores(results, task)}" for task in dict.fromkeys(tasks)]
    books = results.where(lambda row: row.cell.task == "text_books")
    full = next(row for row in books if row.cell.policy == FULL)
    lines = []
    for row in books:
        loss = stats.difference(row.each.nll, full.each.nll, row.each.tokens)
        interval = f"{loss[0]:+.4f} [{loss[1]:+.4f}, {loss[2]:+.4f}]"
        lines.append((f"`{row.cell.policy}`", f"{table.value(row):.2f}", interval))
    storages = table.markdown(("storage", "perplexity", "nats a token more than full"), lines)
    return (
        "\n\n".join(["## Each against its relative", pairs(results), *parts, f"## Books\n\n{storages}"])
        + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the tables; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.relatives", description=(__doc__ or "").splitlines()[0])
    cli.add(parser, "--out", required=True)
    out: Path = parser.parse_args(words).out
    text = page(Results(tuple(read(out))))
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    cli.start(main)
