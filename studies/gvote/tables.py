"""What ``kvjax.eval`` measured of configs/eval/gvote_samples.yaml: who stays, how many, and in which heads.

python -m studies.gvote.tables results/gvote/samples
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvjax import cli
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.measure.store import read
from kvjax.eval.report import stats, table

WHO, COUNTED = "Who stays, at the same number of slots", "How many stay, where no budget is set"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; the exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.gvote.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of results")
    rows = read(parser.parse_args(words).folder)
    print("\n".join(text(rows)))


def text(rows: Sequence[Row]) -> Iterator[str]:
    """The tables as Markdown."""
    counted = [
        row for row in rows if row.cell.policy != table.FULL and parse_policy(row.cell.policy).budget.voted
    ]
    ranked = [row for row in rows if row not in counted]
    for title, some in ((WHO, ranked), (COUNTED, counted)):
        yield f"### {title}"
        yield ""
        yield from scores(some)
        yield ""
    yield "### Slots by KV head, % of the tokens"
    yield ""
    yield from slots(counted)


def scores(rows: Sequence[Row]) -> Iterator[str]:
    """A line a policy: mean over the tasks that are scored, with its interval over samples; then each task.

    Every task counts alike. A cell has the score in % (text: perplexity), then the tokens kept in %.
    """
    tasks = list(dict.fromkeys(row.cell.task for row in rows))
    by_samples = sorted(
        rows, key=lambda row: row.cell.samples
    )  # of a policy's cells the one with most counts
    lines = []
    for policy in dict.fromkeys(row.cell.policy for row in rows):
        own = {row.cell.task: row for row in by_samples if row.cell.policy == policy}
        cells = [
            f"{table.value(own[task]):.1f} / {100 * own[task].kept_fraction:.0f}" if task in own else "–"
            for task in tasks
        ]
        lines.append([f"`{policy}`", kept(list(own.values())), mean(list(own.values())), *cells])
    yield table.markdown(["policy", "kept, %", "mean score, % (95 %)", *tasks], lines)


def kept(rows: Sequence[Row]) -> str:
    """Tokens kept, mean over tasks."""
    return f"{100 * np.mean([row.kept_fraction for row in rows]):.1f}"


def mean(rows: Sequence[Row]) -> str:
    """Mean over tasks with a score, each counting alike; its interval is over samples, and so over draws."""
    scored = [row for row in rows if row.score is not None]
    if not scored:
        return "–"
    values = [100 * x for row in scored for x in table.quality(row)]
    weights = [1 / len(row.each.score) for row in scored for _ in row.each.score]
    return "{:.1f} ({:.1f} … {:.1f})".format(*stats.interval(values, weights))


def slots(rows: Sequence[Row]) -> Iterator[str]:
    """A line a policy: tokens kept by layer and KV head, mean over tasks."""
    lines = []
    for policy in dict.fromkeys(row.cell.policy for row in rows):
        heads = np.mean([row.heads for row in rows if row.cell.policy == policy], axis=0)
        lines.append([f"`{policy}`", *(" ".join(f"{100 * x:.0f}" for x in layer) for layer in heads)])
    count = len(rows[0].heads) if rows else 0
    yield table.markdown(["policy", *(f"layer {layer}" for layer in range(count))], lines)


if __name__ == "__main__":
    cli.start(main)
