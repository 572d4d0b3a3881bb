"""A sample: the text to read, the question, the right answer, and where in the text the answer stood.

  <bos> CONTEXT | QUESTION | PREFIX | ANSWER
        spans                        scored

The four texts are encoded together, so that tokens are those of the whole prompt; a token belongs to
the text that its last character is in. Length counts everything: BOS, the texts, and what may be
written beyond the reference answer.

A model with a chat template is asked as a user asks it. What the template writes belongs to the text it
stands before, so that a prompt is cut where kvpress's pipeline cuts it:

  HEAD CONTEXT | QUESTION | MIDDLE PREFIX | ANSWER
  user's turn ------------- assistant's turn, open
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.eval.errors import EvalError

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
      classes: names of all classes, for scores that look for others in the output.
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
    classes: tuple[str, ...] = ()
    max_new: int = 0
    tags: dict[str, float | list[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """The same as token ids.

    Attributes:
      context: BOS included, or what the template writes before it.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """What a chat template writes before the user's words, and between them and the assistant's."""

    head: str
    middle: str


@functools.lru_cache(maxsize=4)
def frame(text: Text) -> Frame:
    """The frame of a tokenizer's chat template.

    Raises:
      EvalError: a template that raises, or that does not write both turns once and in order.
    """
    user, assistant = "QUESTION-OF-THE-USER", "ANSWER-OF-THE-ASSISTANT"
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    try:
        shown = text.render(messages, add_generation_prompt=False, continue_final_message=True)
    except ValueError as error:
        raise EvalError(f"{error} Give --raw to ask without the template.") from error
    head, *rest = shown.split(user)
    middle, *rest = "".join(rest).split(assistant) if len(rest) == 1 else [""]
    if rest != [""]:
        raise EvalError(
            "The model's chat template does not show a question and the beginning of an answer. "
            "Give --raw to ask without it."
        )
    return Frame(head=head, middle=middle)


def encode(text: Text, sample: Sample, *, chat: bool = False) -> Encoded:
    """Token ids of a sample; with ``chat`` through the chat template, which then decides about BOS.

    The assistant's turn begins with the prefix, without the separator that parts it from the question.
    """
    around = frame(text) if chat else Frame(head="", middle="")
    prefix = sample.prefix.lstrip() if chat else sample.prefix
    parts = (around.head + sample.context, sample.question, around.middle + prefix, sample.answer)
    encoding = text.tokenizer.encode("".join(parts), add_special_tokens=False)
    ids = np.asarray(encoding.ids, np.int64)
    stops = np.asarray([stop for _, stop in encoding.offsets])
    starts = np.asarray([start for start, _ in encoding.offsets])
    ends = np.cumsum([len(part) for part in parts])
    owner = np.searchsorted(ends, stops)
    pieces = [ids[owner == i].tolist() for i in range(4)]
    bos = [] if text.bos is None or chat else [text.bos]

    def inside(spans: Sequence[Span], shift: int) -> np.ndarray:
        """Index of the span each token overlaps, else -1."""
        hit = np.full(len(ids), -1)
        for number, (first, last) in enumerate(spans):
            hit[(stops > first + shift) & (starts < last + shift)] = number
        return hit

    needed = inside(sample.spans, len(around.head))[owner == 0] >= 0
    scored = ((0, len(sample.answer)),) if sample.scored is None else sample.scored
    return Encoded(
        context=bos + pieces[0],
        question=pieces[1],
        prefix=pieces[2],
        answer=pieces[3],
        needed=np.concatenate([np.zeros(len(bos), bool), needed]),
        scored=inside(scored, int(ends[2]))[owner == 3],
        labels=tuple(text.encode(label, bos=False) for label in sample.labels),
        bytes=sum(len(sample.answer[a:b].encode()) for a, b in scored),
    )


def length(encoded: Encoded, max_new: int) -> int:
    """L: everything a row holds."""
    prompt = len(encoded.context) + len(encoded.question) + len(encoded.prefix)
    return prompt + max(len(encoded.answer), max_new, *map(len, encoded.labels), 0)
