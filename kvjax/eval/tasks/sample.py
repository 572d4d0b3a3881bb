"""A sample: the text to read, the question, the right answer, and where in the text the answer stood.

  <bos> CONTEXT | QUESTION | PREFIX | ANSWER
        spans                        scored

The four texts are encoded together, so that tokens are those of the whole prompt; a token belongs to
the text that its last character is in. Length counts everything: BOS, the texts, and what may be
written beyond the reference answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from kvjax.text import Text

Span = tuple[int, int]
"""The first character, and the one behind the last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One text sample.

    Attributes:
      context: read first; may be compressed before the question is seen.
      question: begins with its own separator; "" where nothing is asked.
      prefix: the beginning of the answer sentence.
      answer: the reference as it continues the prefix, its leading blank included; teacher-forced.
      refs: answers that a scorer looks for in the output.
      spans: characters of the context that hold the answer.
      scored: characters of the answer whose tokens count; None: all.
      labels: all possible answers as they would continue the prefix; () where there is no such set.
      max_new: tokens to write; 0 where only the reference is judged.
      tags: facts that results are grouped by, such as depth; a list has one entry a scored span.
    """

    context: str
    question: str = ""
    prefix: str = ""
    answer: str
    refs: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    scored: tuple[Span, ...] | None = None
    labels: tuple[str, ...] = ()
    max_new: int = 0
    tags: dict[str, float | list[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """The same as token ids.

    Attributes:
      context: BOS included.
      question, prefix, answer: ids of the other texts.
      needed: of each context token, does it hold part of the answer?
      scored: of each answer token, which of the sample's scored spans it belongs to; -1 counts for nothing.
      labels: ids of each label, as it follows the prefix.
      bytes: UTF-8 bytes of the scored answer, for bits per byte.
    """

    context: list[int]
    question: list[int]
    prefix: list[int]
    answer: list[int]
    needed: Bool[np.ndarray, " T"]
    scored: Int[np.ndarray, " T"]
    labels: tuple[list[int], ...]
    bytes: int


Samples = list[tuple[Sample, Encoded]]
"""The samples of a cell, in order."""


def encode(text: Text, sample: Sample) -> Encoded:
    """Token ids of a sample."""
    parts = (sample.context, sample.question, sample.prefix, sample.answer)
    encoding = text.tokenizer.encode("".join(parts), add_special_tokens=False)
    ids = np.asarray(encoding.ids, np.int64)
    stops = np.asarray([stop for _, stop in encoding.offsets])
    starts = np.asarray([start for start, _ in encoding.offsets])
    ends = np.cumsum([len(part) for part in parts])
    owner = np.searchsorted(ends, stops)
    pieces = [ids[owner == i].tolist() for i in range(4)]
    bos = [] if text.bos is None else [text.bos]

    def inside(spans: Sequence[Span], shift: int) -> np.ndarray:
        """Index of the span each token overlaps, else -1."""
        hit = np.full(len(ids), -1)
        for number, (first, last) in enumerate(spans):
            hit[(stops > first + shift) & (starts < last + shift)] = number
        return hit

    begin = int(ends[2])
    scored = ((0, len(sample.answer)),) if sample.scored is None else sample.scored
    return Encoded(
        context=bos + pieces[0],
        question=pieces[1],
        prefix=pieces[2],
        answer=pieces[3],
        needed=np.concatenate([np.zeros(len(bos), bool), inside(sample.spans, 0)[owner == 0] >= 0]),
        scored=inside(scored, begin)[owner == 3],
        labels=tuple(text.encode(label, bos=False) for label in sample.labels),
        bytes=sum(len(sample.answer[a:b].encode()) for a, b in scored),
    )


def length(encoded: Encoded, max_new: int) -> int:
    """L: everything a row holds."""
    prompt = len(encoded.context) + len(encoded.question) + len(encoded.prefix)
    return prompt + max(len(encoded.answer), max_new, *map(len, encoded.labels), 0)
