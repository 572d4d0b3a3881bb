"""``profile``: where a decode step's time goes, for every shipped policy, as a page.

Batch 1. The parts come from a ladder of programs that leave out more and more (``ladder.py``), on a state
that is filled without reading a prompt (``fill.py``), all in one process (``ablate.py``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.child import Child, ChildError
from benchmarks.decode import Advance
from benchmarks.results import Row
from benchmarks.sides import OURS, WARM, Comparison
from kvjax import catalogue

Cell = tuple[str, int, str]

EVERY_STEP = "knorm + uniform(512, every_step)"
"""No preset evicts while decoding; this one does, at every step."""

LIMIT = 0.10
"""Most of a step that policy work may take."""

PARTS = {"host": "host", "weights": "weights", "ring": "ring", "GLOBAL": "global", "policy work": "policy"}
"""Columns of the page and the parts they show, in ms."""

_INTRODUCTION = """\
How it was measured. Every figure is a median over multi-step decodes of the real decode loop
(`kvjax.decode.decode_steps`), taken in turns in one process. The parts are differences between programs of a
ladder: *weights* (embedding, projections, MLP, logits and sampling; attention returns q + k + v),
*ring* (the new token is also written to the ring, and the ring is read), *GLOBAL* (as many pages as the
policy selects are also read, but nothing enters or leaves them), *policy work* (the real step:
admission, window exits, moves, eviction, selection, metadata). *Host* is reading the page counts and an empty
program with the same arguments. By construction the parts add up to the step. *Check* is an independent sum:
(weights + a program of attention alone, without weights) / step, from two programs that share nothing; it
should be about 1. Parts of a few per cent are within the noise and may be negative. The host's part
is per token of a multi-step decode of {tokens} steps; `generate` takes 64 steps at a time.

The state is synthetic: keys, values and queries are drawn at random, then admitted, ranked and stored by the
policy itself; no prompt was read. Pools have the size that `stream` gives them, for up to 512 further tokens.
Learned parts have untrained weights (`wg-kv`: gates that admit about a quarter of what the model writes).
"""


def cell(row: Row) -> Cell:
    """What is measured as a whole."""
    return row["dtype"], row["context"], row["config"]


def cells(settings: Comparison, have: Collection[Cell] = ()) -> list[Cell]:
    """The policies asked for, by default all that are shipped, without the cells in ``have``."""
    specs = list(settings.policies)
    if settings.policies == OURS:
        known = {catalogue.policy(spec) for spec in specs}
        specs += [spec for spec in (*shipped(), EVERY_STEP) if catalogue.policy(spec) not in known]
    every = itertools.product(settings.dtypes, settings.contexts, specs)
    return [one for one in every if one not in have]


def shipped() -> list[str]:
    """Every preset, and for each discovered part that no preset uses the first example that shows it."""
    specs = list(catalogue.PRESETS)
    shown = {type(part) for spec in specs for part in catalogue.policy(spec).chain}
    for method in catalogue.methods():
        for example in method.examples:
            if not shown.issuperset(map(type, example.chain)):
                specs.append(repr(example))
                shown.update(map(type, example.chain))
    return specs


def measure(
    settings: Comparison,
    folder: Path,
    done: Callable[[list[Row]], None],
    advance: Advance,
    have: Collection[Cell],
) -> None:
    """Rows as in ``decode.measure``; a policy that cannot be measured is skipped with the reason."""
    how = {"tokens": settings.tokens, "warm": WARM, "rounds": settings.rounds, "seed": settings.seed}
    for dtype, same_dtype in itertools.groupby(cells(settings, have), lambda one: one[0]):
        with Child([sys.executable, "-m", "benchmarks.ablate"], settings.threads) as child:
            child.ask("load", folder=str(folder), dtype=dtype)
            for _, context, spec in same_dtype:
                row: Row = {"system": "kvjax", "config": spec, "context": context, "batch": 1, "dtype": dtype}
                row["segment"] = settings.tokens
                try:
                    row |= parts(child.ask("profile", spec=spec, context=context, **how))
                except ChildError as error:
                    row["skipped"] = str(error)
                done([row])
                advance(1.0)


def work(settings: Comparison, have: Collection[Cell]) -> float:
    """All work of ``measure``."""
    return float(len(cells(settings, have)))


def parts(measured: Row) -> Row:
    """Microseconds a token of each part, from the ladder's programs."""
    rung, host = measured["seconds"], measured["host"]
    read = rung.get("read", rung["ring"])
    seconds = {
        "host": host,
        "weights": rung["weights"] - host,
        "ring": rung["ring"] - rung["weights"],
        "global": read - rung["ring"],
        "policy": rung["all"] - read,
    }
    return {
        "policy": measured["policy"],
        "step_us": round(rung["all"] * 1e6, 1),
        "tokens_per_s": round(1 / rung["all"], 2),
        "parts_us": {name: round(value * 1e6, 1) for name, value in seconds.items()},
        "policy_share": round(seconds["policy"] / rung["all"], 4),
        "check": round((rung["weights"] + rung["alone"] - host) / rung["all"], 3),
        "live_bytes": measured["live_bytes"],
        "allocated_bytes": measured["allocated_bytes"],
        "weight_bytes": measured["weight_bytes"],
        "rungs_s": measured["rounds"],
    }


def page(runs: Sequence[Row]) -> str:
    """The saved runs as Markdown."""
    lines = ["# Where a decode step's time goes", "", "Generated by the commands below; do not edit.", ""]
    for run in runs:
        at, model = run["machine"], run["model"]
        lines.append(
            f"* `{run['command']}` on {run['date']}: {at['cpu']}, {at['threads']} thread(s), "
            f"jax {at['jax']}, commit {at['commit']}; {model['parameters']:,} random parameters (seed "
            f"{model['seed']}), batch 1."
        )
    everything = list({cell(row): row for run in runs for row in run["rows"]}.values())  # the newest of each
    tokens = " or ".join(str(n) for n in sorted({row["segment"] for row in everything}))
    lines += ["", *_INTRODUCTION.format(tokens=tokens).splitlines(), ""]
    for context, dtype in sorted({(row["context"], row["dtype"]) for row in everything}):
        rows = [row for row in everything if (row["context"], row["dtype"]) == (context, dtype)]
        lines += [f"## {context} tokens, {dtype}", "", *_table(rows), ""]
    over = [
        f"`{row['config']}` at {row['context']} tokens, {row['dtype']} ({row['policy_share']:.0%})"
        for row in everything
        if row.get("policy_share", 0) > LIMIT
    ]
    verdict = f"Above it: {', '.join(over)}." if over else "No policy is above it."
    lines += [f"Aim: policy work takes at most {LIMIT:.0%} of the step. {verdict}", ""]
    return "\n".join(lines)


def _table(rows: list[Row]) -> list[str]:
    names = ("policy", "step, ms", *PARTS, "share", "check", "live MiB", "GB/s")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"| `{row['config']}` | skipped: {row['skipped']} |" + " |" * 9)
            continue
        moved = (row["weight_bytes"] + row["live_bytes"]) / row["step_us"] / 1e3
        cells = [f"`{row['config']}`", f"{row['step_us'] / 1e3:.2f}"]
        cells += [f"{row['parts_us'][name] / 1e3:.2f}" for name in PARTS.values()]
        cells += [
            f"{row['policy_share']:.1%}",
            f"{row['check']:.2f}",
            f"{row['live_bytes'] / 2**20:.1f}",
            f"{moved:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "GB/s: bytes of weights and live slots over the step's time."]
