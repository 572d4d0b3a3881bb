"""What the tables are asked: our speed over the peers', bytes over the full cache's, and the aims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.sides import FULL, PER_HEAD, UNIFORM

Row = dict[str, Any]

OURS_FULL, OURS_UNIFORM, OURS_PER_HEAD = ("kvjax", FULL), ("kvjax", UNIFORM), ("kvjax", PER_HEAD)
QUARTER = ("kvjax", "quarter")
SHARE = (OURS_PER_HEAD, OURS_FULL)
TRANSFORMERS, SNAPKV, ADAKV = ("transformers", "full"), ("kvpress", "snapkv 75 %"), ("kvpress", "adakv 75 %")


@dataclasses.dataclass(frozen=True)
class Question:
    """One figure of two rows divided.

    Attributes:
      what: in words.
      field: of both rows.
      above, below: (system, config) of the two rows.
      aim: the ratio wanted, or None.
      most: the aim is an upper limit.
    """

    what: str
    field: str
    above: tuple[str, str]
    below: tuple[str, str]
    aim: float | None = None
    most: bool = False


DECODE = (
    Question("full cache, speed over transformers", "tokens_per_s", OURS_FULL, TRANSFORMERS, 1.5),
    Question("per-head 75 %, speed over our dense quarter", "tokens_per_s", OURS_PER_HEAD, QUARTER, 0.8),
    Question("per-head 75 %, speed over kvpress AdaKV", "tokens_per_s", OURS_PER_HEAD, ADAKV, 4.0),
    Question("uniform 75 %, speed over kvpress SnapKV", "tokens_per_s", OURS_UNIFORM, SNAPKV),
    Question("per-head 75 %, speed over our full cache", "tokens_per_s", OURS_PER_HEAD, OURS_FULL),
    Question("live bytes over full, after the prompt", "live_bytes", *SHARE, 0.28, True),
    Question("allocated bytes over full, after the prompt", "allocated_bytes", *SHARE, 0.32, True),
    Question("allocated bytes over full, while decoding", "allocated_bytes_end", *SHARE, 0.32, True),
)
PREFILL = (
    Question("full cache, time to first token over transformers", "ttft_s", OURS_FULL, TRANSFORMERS),
    Question("per-head, time to first token over kvpress AdaKV", "ttft_s", OURS_PER_HEAD, ADAKV),
    Question("per-head, peak memory over kvpress AdaKV", "peak_rss_growth_bytes", OURS_PER_HEAD, ADAKV),
    Question("per-head, peak memory over our full cache", "peak_rss_growth_bytes", OURS_PER_HEAD, OURS_FULL),
)

QUESTIONS = {"decode": DECODE, "prefill": PREFILL}

OVER_FULL = {
    "decode": (
        ("speed over our full cache", "tokens_per_s"),
        ("live bytes over full, after the prompt", "live_bytes"),
        ("allocated bytes over full, after the prompt", "allocated_bytes"),
        ("allocated bytes over full, while decoding", "allocated_bytes_end"),
    ),
    "prefill": (
        ("prompt speed over our full cache", "prompt_tokens_per_s"),
        ("most bytes allocated over full", "peak_allocated_bytes"),
    ),
}
"""What every further policy of ours is asked: in words, and the field."""


def questions(table: str, rows: Sequence[Row]) -> list[Question]:
    """Everything a table is asked: fixed questions, and every further policy of ours over our full cache."""
    known = {name for question in QUESTIONS[table] for name in (question.above, question.below)}
    more = dict.fromkeys((row["system"], row["config"]) for row in rows if row["system"] == "kvjax")
    found = list(QUESTIONS[table])
    for side in more:
        if side not in known:
            found += [
                Question(f"`{side[1]}`, {what}", field, side, OURS_FULL) for what, field in OVER_FULL[table]
            ]
    return found


def answer(questions: Sequence[Question], rows: Sequence[Row]) -> list[Row]:
    """Every question at every context, batch and dtype where both rows were measured.

    Returns:
      what, context, batch, dtype, ratio, and where there is one: aim, at_most, met.
    """

    def where(row: Row) -> tuple[Any, ...]:
        return row["context"], row["batch"], row["dtype"]

    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        found.setdefault(where(row), {})[(row["system"], row["config"])] = row
    return [
        _answered(question, place, sides)
        for place, sides in found.items()
        for question in questions
        if _has(sides, question.above, question.field) and _has(sides, question.below, question.field)
    ]


def _has(sides: dict[tuple[str, str], Row], name: tuple[str, str], field: str) -> bool:
    return bool(sides.get(name, {}).get(field))


def _answered(question: Question, place: tuple[Any, ...], sides: dict[tuple[str, str], Row]) -> Row:
    ratio = sides[question.above][question.field] / sides[question.below][question.field]
    found: Row = {"what": question.what} | dict(zip(("context", "batch", "dtype"), place))
    found |= {"ratio": round(ratio, 3)}
    if question.aim is not None:
        reached: Callable[[float, float], bool] = float.__le__ if question.most else float.__ge__
        found |= {"aim": question.aim, "at_most": question.most, "met": reached(ratio, question.aim)}
    return found
