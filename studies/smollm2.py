"""What configs/eval/smollm2.yaml measured: tables, a picture, and the measurements that ``auto`` chooses by.

python -m studies.smollm2 results/smollm2/eval --out results/smollm2 --front FILE

Prints the tables as Markdown. Each own method of the five papers
is compared with the best other method of the same cell, on the same samples, at no more bytes (of those that
choose what a step reads: at no more reads), and that feeds a prompt once, as they do.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import cli
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.measure.row import Row
from kvjax.eval.measure.store import ABOUT, read
from kvjax.eval.report import front, plotting, stats, table
from kvjax.eval.report.plotting import panels, pyplot, saved, style

HEAD_DIM = 64
"""Of SmolLM2-135M."""

OWN = frozenset({"write_gate", "conf_kv", "kvp", "gvote", "phi", "kvp_oracle"})
"""Parts that the five papers are about, and the oracle, which is nobody's rival."""

LARGER = 1.05
"""A rival may hold, or read, so many times as much: rounding does not help the papers' methods."""

TEXT = "text"
"""The cell of all passages; any other is a task's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A cell: where policies can be compared, because all saw the same samples.

    Attributes:
      what: TEXT, or the name of a task.
      length: of the prompts, tokens.
      protocol: agnostic or aware, the question unseen or seen; text has none and is agnostic.
    """

    what: str
    length: int
    protocol: str

    @property
    def title(self) -> str:
        """For people."""
        unseen = "" if self.what == TEXT else f", {front.PROTOCOLS[self.protocol]}"
        return f"{self.what}, {self.length:,} tokens{unseen}"

    @property
    def order(self) -> tuple[bool, str, int, str]:
        """Its place among the tables: texts first, shorter prompts first, questions unseen first."""
        return self.what != TEXT, self.what, self.length, self.protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A policy in a cell: its rows, a row a task.

    Attributes:
      name: the policy, with weights that are not the default.
      rows: in the order of tasks.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def own(self) -> bool:
        """Is it a method of one of the five papers?"""
        return bool(self.rows[0].parts & OWN)

    @property
    def share(self) -> float:
        """Live bytes when the answer begins, over the full cache's."""
        return float(np.mean([front.share(_readable(row), HEAD_DIM) for row in self.rows]))

    @property
    def reads(self) -> float:
        """Tokens a step loads per KV head, φ as the paper counts it."""
        return float(np.mean([row.reads.equivalent() for row in self.rows]))

    @property
    def size(self) -> float:
        """What is equal where two policies are compared: reads of one that selects, bytes of another."""
        return self.reads if self.rows[0].selects else self.share

    @property
    def coded(self) -> bool:
        """Does it store slots in fewer bits? Whatever chooses slots can have them so, too."""
        return any(part["place"] == "storage" for part in self.rows[0].policy["parts"])

    @property
    def replays(self) -> bool:
        """Does it feed a prompt twice?"""
        return parse_policy(_readable(self.rows[0]).cell.policy).eviction.replays

    @property
    def values(self) -> list[float]:
        """Higher is better, a number a sample: minus the divergence in nats, or the score in [0, 1]."""
        return [-x if row.each.kl else x for row in self.rows for x in (row.each.kl or row.each.score)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its exit code."""
    return cli.run(_run, argv)


def _run(words: Sequence[str]) -> None:
    parser = cli.Parser(prog="python -m studies.smollm2", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of results")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the picture, bytes.png")
    parser.add_argument("--front", type=Path, metavar="FILE", help="what auto chooses by")
    args = parser.parse_args(words)
    rows = read(args.folder)
    print("\n".join(text(rows)))
    if args.front is not None:
        facts = json.loads((args.folder / ABOUT).read_text(encoding="utf-8"))
        args.front.write_text(as_json(rows, facts), encoding="utf-8")
    if args.out is not None:
        if plotting.available():
            draw(rows, args.out / "bytes.png")
        else:
            print(f"note: written without a picture. {plotting.INSTALL}", file=sys.stderr)


def cells(rows: Sequence[Row]) -> dict[Place, list[Entry]]:
    """The policies of every cell, in the order measured. Of a policy's runs of a task the longest counts.

    A policy that decides on arrival has one row for both protocols; where nothing else was measured there is
    no cell of questions seen. Texts are one cell, and a policy that lacks one of them is not in it.
    """
    places: dict[Place, dict[str, dict[str, Row]]] = {}
    for row in sorted(rows, key=lambda row: row.cell.samples):
        what = TEXT if row.each.kl is not None else row.cell.task
        protocols = ["agnostic", "aware"] if row.cell.protocol == "either" else [row.cell.protocol]
        for protocol in protocols if what != TEXT else ["agnostic"]:
            place = Place(what=what, length=row.cell.length, protocol=protocol)
            places.setdefault(place, {}).setdefault(_name(row), {})[row.cell.task] = row
    found = {}
    for place, by_name in sorted(places.items(), key=lambda item: item[0].order):
        measured = {row.cell.protocol for own in by_name.values() for row in own.values()}
        if place.protocol == "aware" and measured == {"either"}:
            continue
        tasks = sorted({task for own in by_name.values() for task in own})
        whole = {name: own for name, own in by_name.items() if set(own) == set(tasks)}
        found[place] = [
            Entry(name=name, rows=tuple(own[task] for task in tasks)) for name, own in whole.items()
        ]
    return {place: own for place, own in found.items() if len(own) > 1}


def _readable(row: Row) -> Row:
    """The row under a policy that can be built: the oracle is none, and keeps what a budget alone would."""
    policy = row.cell.policy.removeprefix("kvp_oracle + ")
    return dataclasses.replace(row, cell=dataclasses.replace(row.cell, policy=policy))


def _name(row: Row) -> str:
    files = [label.split("@")[0].split("=")[-1] for label in row.cell.weights.split(",") if label]
    kinds = [name.split("-", 1)[1] for name in files if "-" in name]
    return f"{row.cell.policy} [{', '.join(kinds)}]" if kinds else row.cell.policy


def rival(entry: Entry, others: Sequence[Entry]) -> Entry | None:
    """The best method of another origin at no more bytes, or reads, with as many passes and bits as this one.

    None where none is that small.
    """

    def fits(other: Entry) -> bool:
        alike = other.rows[0].selects == entry.rows[0].selects and other.coded == entry.coded
        alike = alike and len(other.values) == len(entry.values) and not other.replays
        full = other.rows[0].cell.policy == table.FULL
        return alike and not other.own and not full and other.size <= entry.size * LARGER

    return max(filter(fits, others), key=lambda other: float(np.mean(other.values)), default=None)


def text(rows: Sequence[Row]) -> Iterator[str]:
    """All tables as Markdown: what the full cache solves, then a table a cell."""
    yield "### What the full cache solves"
    yield ""
    yield solved(rows)
    for place, entries in cells(rows).items():
        yield f"\n### {place.title[0].upper()}{place.title[1:]}\n"
        yield passages(entries) if place.what == TEXT else answers(entries)


def solved(rows: Sequence[Row]) -> str:
    """The full cache on tasks with answers; solved from 80 % on."""
    lines = []
    for row in rows:
        if row.cell.policy == table.FULL and row.each.kl is None and row.score is not None:
            mean, low, high = stats.interval([100 * x for x in row.each.score])
            verdict = "yes" if row.informative else "no"
            line = [row.cell.task, row.cell.length, row.cell.samples, f"{mean:.1f} ({low:.1f} … {high:.1f})"]
            lines.append([*line, verdict])
    return table.markdown(["task", "tokens", "n", "full cache, %", "solved"], lines)


def passages(entries: Sequence[Entry]) -> str:
    """Divergence from the full cache by text, likeliest tokens kept, perplexity over the full cache's."""
    tasks = [row.cell.task.removeprefix("text_") for row in entries[0].rows]
    lines = []
    for entry in sorted(entries, key=lambda entry: (round(entry.share, 1), -float(np.mean(entry.values)))):
        if entry.rows[0].cell.policy == table.FULL:
            continue
        kl = [f"{np.mean(row.each.kl or []):.3f}" for row in entry.rows]
        tokens = [100 * x for row in entry.rows for x in row.each.top or []]
        nats = [row.nll - row.full.nll for row in entry.rows]
        lines.append(
            [*_head(entry), _spread([-x for x in entry.values], 3), *kl, _spread(tokens, 1),
             f"{np.exp(np.mean(nats)):.3f}", *_against(entry, entries, 1, 3)]
        )  # fmt: skip
    heads = ["policy", "bytes, %", "reads", "KL, nats (95 %)", *tasks, "same token, %", "ppl over full's"]
    return table.markdown([*heads, "over the best other", "which"], lines)


def answers(entries: Sequence[Entry]) -> str:
    """Share of questions answered."""
    lines = [
        [*_head(entry), len(entry.values), _spread([100 * x for x in entry.values], 1),
         *_against(entry, entries, 100, 1)]
        for entry in sorted(entries, key=lambda entry: (round(entry.share, 1), -float(np.mean(entry.values))))
    ]  # fmt: skip
    heads = ["policy", "bytes, %", "reads", "n", "right, % (95 %)", "over the best other", "which"]
    return table.markdown(heads, lines)


def _head(entry: Entry) -> list[str]:
    return [f"`{entry.name}`", f"{100 * entry.share:.0f}", f"{entry.reads:.0f}"]


def _spread(values: Sequence[float], digits: int) -> str:
    mean, low, high = (f"{x:.{digits}f}" for x in stats.interval(values))
    return f"{mean} ({low} … {high})"


def _against(entry: Entry, entries: Sequence[Entry], scale: float, digits: int) -> list[str]:
    """How much better an own method is than its rival, paired, and which that is; blank for others."""
    best = rival(entry, entries) if entry.own else None
    if best is None:
        return ["–" if entry.own else "", ""]
    mean, low, high = (f"{scale * x:+.{digits}f}" for x in stats.difference(entry.values, best.values))
    return [f"{mean} ({low} … {high})", f"`{best.name}`"]


def points(rows: Sequence[Row], length: int) -> list[front.Point]:
    """Text and questions counted alike: likeliest tokens kept and questions answered, %, question unseen.

    Only policies that were measured on all texts and on every solved task of that length.
    """
    kinds = [
        {entry.name: entry for entry in entries if place.what == TEXT or entry.rows[0].informative}
        for place, entries in cells(rows).items()
        if (place.length, place.protocol) == (length, "agnostic")
    ]
    kinds = [kind for kind in kinds if kind]
    return [_point([kind[name] for kind in kinds]) for name in kinds[0] if all(name in k for k in kinds)]


def _point(entries: Sequence[Entry]) -> front.Point:
    """A policy's cells as one: those of text count together as much as those of questions."""
    rows = [row for entry in entries for row in entry.rows]
    halves = [[row for row in rows if (row.each.kl is None) == asked] for asked in (False, True)]
    values: list[float] = []
    weights: list[float] = []
    for half in filter(None, halves):
        for row in half:
            each = row.each.top or row.each.score
            values += [100 * x for x in each]
            weights += [1 / (len(half) * len(each))] * len(each)
    mean, low, high = stats.interval(values, weights)
    return front.Point(
        policy=rows[0].cell.policy,
        name=entries[0].name,
        family=rows[0].policy["family"],
        weights=rows[0].cell.weights,
        kept=float(np.mean([row.kept_fraction for row in rows])),
        share=float(np.mean([front.share(row, HEAD_DIM) for row in rows])),
        score=mean,
        low=low,
        high=high,
        tasks=len(rows),
    )


def as_json(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """What ``auto`` reads: by length the policies without weights that no other beats at no more bytes."""
    found = []
    for length in sorted({row.cell.length for row in rows}):
        group = points(rows, length)
        usable = [p for p in group if not p.weights and front.for_auto(p, group)]
        found += [
            {"length": length, "protocol": "agnostic", **dataclasses.asdict(point)}
            for point in front.front(usable)
            if point.policy != table.FULL
        ]
    command = "python -m studies.smollm2 results/smollm2/eval"
    about = {"command": command, "model": facts["model"], "fingerprint": facts["fingerprint"]}
    return json.dumps(about | {"front": found}, indent=1, ensure_ascii=False) + "\n"


def draw(rows: Sequence[Row], file: Path) -> Path:
    """Text and needles beside each other over bytes, 1,024 tokens: a line a method, its best variant."""
    plt = pyplot()
    found = cells(rows)
    shown: list[tuple[Place, str, Callable[[Entry], float]]] = [
        (
            Place(what=TEXT, length=1024, protocol="agnostic"),
            "KL to the full cache, nats a token",
            _divergence,
        ),
        (Place(what="niah", length=1024, protocol="agnostic"), "needles found, %", _found),
    ]
    shown = [(place, label, of) for place, label, of in shown if place in found]
    numbers: dict[str, int] = {}
    for place, _, _ in shown:
        for entry in filter(_smaller, found[place]):
            numbers.setdefault(_label(entry), len(numbers))
    figure, axes = panels(plt, len(shown), 2, (5.4, 3.9), top=0.07 * len(numbers))
    handles = {}
    for axis, (place, label, of) in zip(axes, shown):
        lines: dict[str, dict[int, Entry]] = {}  # of variants with as many bytes the best one
        for entry in sorted(filter(_smaller, found[place]), key=lambda entry: float(np.mean(entry.values))):
            lines.setdefault(_label(entry), {})[round(100 * entry.share)] = entry
        for name, by_share in lines.items():
            own = [entry for _, entry in sorted(by_share.items())]
            look = style(numbers[name]) | {"linestyle": "-" if own[0].own else "--", "ms": 5, "lw": 1}
            x, y = [100 * entry.share for entry in own], [of(entry) for entry in own]
            handles[name] = axis.plot(x, y, **look)[0]
        for entry in found[place]:
            if entry.rows[0].cell.policy == table.FULL and of(entry) > 0:
                handles["full cache"] = axis.axhline(of(entry), color="0.3", lw=1, ls=":")
        axis.set_xlabel("live bytes at 16 bits, % of the full cache's", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        axis.tick_params(labelsize=8)
        if place.what == TEXT:
            axis.set_yscale("log")
    names = sorted(handles, key=lambda name: numbers.get(name, len(numbers)))
    lines_of = [handles[name] for name in names]
    figure.legend(lines_of, names, loc="outside upper center", ncol=5, fontsize=7, frameon=False)
    return saved(plt, figure, file)


def _smaller(entry: Entry) -> bool:
    """Does it hold less than everything, and read what it holds?"""
    return not entry.rows[0].selects and entry.rows[0].cell.policy != table.FULL


def _label(entry: Entry) -> str:
    """The parts that differ between methods: without numbers and without what protects a few tokens."""
    kinds = "".join(entry.name.partition(" [")[1:])
    words = re.sub(r"\([^()]*\)", "", str(entry.rows[0].policy["family"])).split(" + ")
    return " + ".join(word for word in words if word not in ("sinks", "recent")) + kinds


def _divergence(entry: Entry) -> float:
    return -float(np.mean(entry.values))


def _found(entry: Entry) -> float:
    return 100 * float(np.mean(entry.values))


if __name__ == "__main__":
    cli.start(main)
