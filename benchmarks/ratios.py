"""The ratios of each table: our speed over the peers', bytes over the full cache's, and their aims."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.random_model import PUBLISHED
from benchmarks.results import Row
from benchmarks.sides import FULL, PER_HEAD, QUANTISED, UNIFORM

OURS_FULL, OURS_UNIFORM, OURS_PER_HEAD = ("kvjax", FULL), ("kvjax", UNIFORM), ("kvjax", PER_HEAD)
QUARTER = ("kvjax", "quarter")
INT8, INT4 = (("kvjax", QUANTISED[name].name) for name in ("int8", "int4"))
SHARE = (OURS_PER_HEAD, OURS_FULL)
TRANSFORMERS, SNAPKV, ADAKV = ("transformers", "full"), ("kvpress", "snapkv 75 %"), ("kvpress", "adakv 75 %")


@dataclasses.dataclass(frozen=True)
class Question:
    """A ratio of one field of two rows.

    Attributes:
      what: in words.
      field: of both rows.
      above, below: (system, config) of numerator and denominator.
      aim: the ratio wanted, or None.
      long_aim: wanted from ``LONG`` tokens on, if it is another.
      most: the aim is an upper limit.
    """

    what: str
    field: str
    above: tuple[str, str]
    below: tuple[str, str]
    aim: float | None = None
    most: bool = False
    long_aim: float | None = None


LONG = 8192

DECODE = (
    Question("full cache, speed over transformers", "tokens_per_s", OURS_FULL, TRANSFORMERS, 1.5),
    Question("per-head 75 %, speed over our dense quarter", "tokens_per_s", OURS_PER_HEAD, QUARTER, 0.8),
    Question("per-head 75 %, speed over kvpress AdaKV", "tokens_per_s", OURS_PER_HEAD, ADAKV, 4.0),
    Question("uniform 75 %, speed over kvpress SnapKV", "tokens_per_s", OURS_UNIFORM, SNAPKV),
    Question("per-head 75 %, speed over our full cache", "tokens_per_s", OURS_PER_HEAD, OURS_FULL),
    Question("live bytes over full, after the prompt", "live_bytes", *SHARE, 0.28, True),
    Question("allocated bytes over full, after the prompt", "allocated_bytes", *SHARE, 0.32, True),
    Question("allocated bytes over full, while decoding", "allocated_bytes_end", *SHARE, 0.32, True),
    Question("int8 weights, speed over our full cache", "tokens_per_s", INT8, OURS_FULL, 0.9),
    Question(
        "int8 weights, resident memory over our full cache", "resident_bytes", INT8, OURS_FULL, 0.6, True
    ),
    Question("int4 weights, speed over our full cache", "tokens_per_s", INT4, OURS_FULL),
    Question("int4 weights, resident memory over our full cache", "resident_bytes", INT4, OURS_FULL),
)
PREFILL = (
    Question("full cache, time to first token over transformers", "ttft_s", OURS_FULL, TRANSFORMERS),
    Question("per-head, time to first token over kvpress AdaKV", "ttft_s", OURS_PER_HEAD, ADAKV),
    Question("per-head, peak memory over kvpress AdaKV", "peak_rss_growth_bytes", OURS_PER_HEAD, ADAKV),
    Question("per-head, peak memory over our full cache", "peak_rss_growth_bytes", OURS_PER_HEAD, OURS_FULL),
)

QUESTIONS = {"decode": DECODE, "prefill": PREFILL}

OF_SIZE = {
    "decode": (dataclasses.replace(DECODE[0], aim=1.0, long_aim=1.3), *DECODE[1:]),
    "prefill": (dataclasses.replace(PREFILL[0], aim=1.0, most=True), *PREFILL[1:]),
}
"""Those of ``random_model.PUBLISHED``, where weights are most of a step."""

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
"""The ratios of every further policy of ours: in words, and the field."""


def questions(table: str, rows: Sequence[Row], size: str | None = None) -> list[Question]:
    """All ratios of a table: the fixed ones, and every further policy of ours over our full cache.

    ``size`` is that of the random model, None of another.
    """
    fixed = (OF_SIZE if size in PUBLISHED else QUESTIONS)[table]
    known = {name for question in fixed for name in (question.above, question.below)}
    more = dict.fromkeys((row["system"], row["config"]) for row in rows if row["system"] == "kvjax")
    return [
        *fixed,
        *(
            Question(f"`{side[1]}`, {what}", field, side, OURS_FULL)
            for side in more
            if side not in known
            for what, field in OVER_FULL[table]
        ),
    ]


def answer(questions: Sequence[Question], rows: Sequence[Row]) -> list[Row]:
    """Every ratio at every context, batch and dtype at which both rows were measured.

    Returns:
      Rows of what, context, batch, dtype, ratio; with an aim also aim, at_most, met.
    """

    cells: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        cell = cells.setdefault((row["context"], row["batch"], row["dtype"]), {})
        cell[(row["system"], row["config"])] = row
    answers = []
    for cell_name, sides in cells.items():
        for question in questions:
            above, below = (sides.get(x, {}).get(question.field) for x in (question.above, question.below))
            if not above or not below:
                continue
            ratio = above / below
            row = {"what": question.what} | dict(zip(("context", "batch", "dtype"), cell_name))
            row["ratio"] = round(ratio, 3)
            aim = question.aim
            if question.long_aim is not None and row["context"] >= LONG:
                aim = question.long_aim
            if aim is not None:
                met = ratio <= aim if question.most else ratio >= aim
                row |= {"aim": aim, "at_most": question.most, "met": met}
            answers.append(row)
    return answers
