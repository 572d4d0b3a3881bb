"""What ``kvjax.eval`` measured of configs/eval/topk_phi.yaml, budget by budget, as Markdown.

The paper's two tables: the same number of retrieved tokens, φ's reading not charged; and the same tokens read
a step, φ's reading charged to one step. A budget that φ alone exceeds is a row of "–".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvjax import catalogue, reads
from kvjax.eval.measure.row import Row
from kvjax.eval.measure.store import RESULTS, read
from kvjax.eval.report import stats, table

CHUNK = 16
"""Quest's."""

SAME = ("topk(1)", *(f"topk({k}){phi}" for k in (11, 21, 29, 62) for phi in ("", " + phi(64)")), "topk(95)")
"""The first table: the anchors (and a token), 1 % of 1,024 and 2,048 tokens, and what other budgets leave."""

SHARES = {1024: (0.04, 0.08), 2048: (0.02, 0.04)}
"""Of the second table, 41 and 82 tokens a step, by length of the prompt."""

MANY = 100
"""Samples from which on nats are shown by task."""


def specs(share: float, prompt: int, features: int = 64, head_dim: int = 64) -> dict[str, str | None]:
    """Policies that read a share of a prompt a step, by method; None where that is infeasible."""
    n = reads.budget(share, prompt)
    alone = reads.retrieved(share, prompt)
    beside = reads.retrieved(share, prompt, features=features, head_dim=head_dim)
    anchored = f"dense=0, sinks=4, tail={CHUNK}"

    def some(count: int | None, form: str, unit: int = 1) -> str | None:
        return form.format(count // unit) if count is not None and count >= unit else None

    return {
        "Top-K": some(alone, "topk({})"),
        "Top-K + φ": some(beside, "topk({}) + " + f"phi({features})"),
        "Quest": some(alone, "quest({}, " + anchored + ")", CHUNK),
        "Quest + φ": some(beside, "quest({}, " + anchored + f") + phi({features})", CHUNK),
        "SnapKV": f"snapkv + uniform({n})",
        "PyramidKV": f"snapkv + pyramid({n})",
        "window": f"window({n - 4}) + sinks(4)",
    }


def text(folders: Sequence[Path]) -> Iterator[str]:
    """Both tables of folders of results, for each length and number of samples."""
    rows = [row for folder in folders if (folder / RESULTS).is_file() for row in read(folder)]
    kinds = sorted({(row.cell.length, row.cell.samples) for row in rows})
    for number, kind in enumerate(kinds):
        yield from [""] * bool(number)
        yield from _of_kind([row for row in rows if (row.cell.length, row.cell.samples) == kind])


def _of_kind(rows: list[Row]) -> Iterator[str]:
    """Both tables of cells of one length and one number of samples."""
    tasks = list(dict.fromkeys(row.cell.task for row in rows))
    length, samples = rows[0].cell.length, rows[0].cell.samples
    known = [t for t in tasks if any(row.informative for row in _of(rows, "full", t))]
    yield f"## Quality, {length} tokens, n = {samples}"
    yield ""
    named = ", ".join(task for task in known if task != "ppl_books")
    books = "; ppl_books: perplexity of 512 tokens after 512" if "ppl_books" in tasks else ""
    yield (
        f"Scores in %{books}. Mean: over the tasks that the full cache answers (others: *), {named}. Read: "
        "tokens a KV head and step in those, question and answer with them; φ: charged to one step, the "
        "paper's count; to choose: what the selection looks at besides. Nats: a token of the reference "
        "answers, more than the full cache's, paired. RULER's cwe and fwe, whose answers depend on "
        "diffuse attention, are missing: this model does not answer them."
    )
    yield ""
    yield "Same number of retrieved tokens:"
    yield ""
    yield from _table([("", word, word) for word in ("full", *SAME)], rows, tasks, known)
    yield ""
    yield "Same tokens read a step (MagicPIG: as measured):"
    yield ""
    lines: list[tuple[str, str, str | None]] = [("", "full", "full"), ("", "MagicPIG", "magicpig(8, 75)")]
    for share in SHARES[length]:
        lines += [(f"{share:g}", name, spec) for name, spec in specs(share, length).items()]
    yield from _table(lines, rows, tasks, known)
    if samples >= MANY:
        yield ""
        yield "Nats by task, for every file of maps that was measured:"
        yield ""
        yield from _nats_by_task(rows, tasks)


def _nats_by_task(rows: list[Row], tasks: list[str]) -> Iterator[str]:
    sides = sorted({(row.cell.policy, row.cell.weights) for row in rows if row.cell.policy != table.FULL})
    shown = []
    for policy, weights in sides:
        own = [row for row in rows if (row.cell.policy, row.cell.weights) == (policy, weights)]
        by_task = {row.cell.task: _nats([row], rows) for row in own}
        shown.append([f"`{policy}`", weights or "–", *(by_task.get(task, "–") for task in tasks)])
    yield table.markdown(["policy", "maps", *tasks], shown)


def _table(
    lines: Sequence[tuple[str, str, str | None]], rows: list[Row], tasks: list[str], known: list[str]
) -> Iterator[str]:
    heads = ["share", "method", "policy", "read", "φ", "to choose", "mean", "nats (95 %)", *tasks]
    shown = []
    for share, name, spec in lines:
        by_task = {} if spec is None else {task: _of(rows, spec, task) for task in tasks}
        if spec is not None and not any(by_task.values()):
            continue
        cells = [_cell(by_task.get(task, [])) for task in tasks]
        own = [
            row for task, some in by_task.items() if task in known for row in some if row.score is not None
        ]
        whole = {row.cell.task for row in own} >= {task for task in known if task != "ppl_books"}
        means = [*_means(own, whole), _nats(own, rows) if whole else "–"]
        shown.append([share, name, f"`{spec}`" if spec else "–", *means, *cells])
    yield table.markdown(heads, shown)


def _of(rows: list[Row], spec: str, task: str) -> list[Row]:
    """The cell with the newest file of its maps, not with one that was trained or silenced anew since."""
    name = repr(catalogue.policy(spec))
    cells = [row for row in rows if row.cell.policy == name]
    newest = {row.cell.weights.partition("@")[0]: row.cell.weights for row in cells}
    return [row for row in cells if row.cell.task == task and row.cell.weights in newest.values()]


def _nats(own: list[Row], rows: list[Row]) -> str:
    """Nats a token of the reference more than the full cache's on the same samples, tokens counting alike."""
    full = {row.cell.drawn: row for row in rows if row.cell.policy == table.FULL}
    pairs = [(row, full[row.cell.drawn]) for row in own if row.cell.drawn in full]
    if not pairs or own[0].cell.policy == table.FULL:
        return "–"
    nats, base = ([x for pair in pairs for x in pair[i].each.nll] for i in (0, 1))
    counts = [float(n) for row, _ in pairs for n in row.each.tokens]
    return "{:+.4f} ({:+.4f} … {:+.4f})".format(*stats.difference(nats, base, counts))


def _cell(rows: list[Row]) -> str:
    return "–" if not rows else f"{table.value(rows[0]):.1f}" + ("" if rows[0].informative else "*")


def _means(rows: list[Row], whole: bool) -> list[str]:
    """Read, φ, to choose, mean score; no mean where tasks are not measured yet."""
    if not rows:
        return ["–"] * 4
    each = np.mean(
        [[r.reads.slots, r.reads.summary_paper, r.reads.selector, table.value(r)] for r in rows], 0
    )
    return [f"{x:.0f}" for x in each[:3]] + [f"{each[3]:.1f}" if whole else "–"]
