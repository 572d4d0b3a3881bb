"""One row as token ids, as kvpress's pipeline makes them (https://github.com/NVIDIA/kvpress, pipeline.py).

  HEAD CONTEXT | QUESTION TAIL PREFIX | ANSWER
  user's turn ----------- assistant's turn, open

The chat template is applied to the context alone, with thinking off; what it writes behind the user's words
is TAIL. A model without a template gets BOS before the context and a line break as TAIL. The two sides of the
bar are encoded apart. ``aware``: the question is part of the context (kvpress's ``compress_questions``).
"""

from __future__ import annotations

import numpy as np

from kvjax.eval.errors import EvalError
from kvjax.eval.suites.suite import Row, Suite
from kvjax.eval.tasks.sample import Encoded, Sample
from kvjax.text import Text


def encoded(
    suite: Suite, row: Row, index: int, text: Text, *, chat: bool, aware: bool, most: int
) -> tuple[Sample, Encoded]:
    """A row as a sample.

    Args:
      suite, row, index: the row of the data set, and which one it is.
      text: the model's tokenizer.
      chat: through its chat template.
      aware: is the question compressed, too?
      most: positions of the model; a longer context loses its end, as in kvpress.

    Raises:
      EvalError: a template that fails, or that does not show the user's words; no room for any context.
    """
    refs = suite.refs(row)
    sample = Sample(
        context=row["context"] + (row["question"] if aware else ""),
        question="" if aware else row["question"],
        prefix=row["answer_prefix"],
        answer=" " + ", ".join(refs if suite.benchmark == "ruler" else refs[:1]),
        refs=refs,
        classes=suite.labels(row),
        max_new=row["max_new_tokens"],
        tags={"row": float(index)},
    )
    before, after = _around(text, sample.context, chat)
    context = text.encode(before, bos=not chat)
    tail = text.encode(sample.question + after + sample.prefix, bos=False)
    answer = text.encode(sample.answer, bos=False) or tail[-1:]
    room = most - len(tail) - max(len(answer), sample.max_new)
    if room < 1:
        raise EvalError(
            f"row {index} of {suite.name} leaves no room for its context in the model's {most} positions. "
            "Give a model with more positions."
        )
    context = context[:room]
    # Ids of the question alone are not known; the protocols differ in what is before the bar, and this is it.
    return sample, Encoded(
        context=context,
        question=[] if aware else tail,
        prefix=tail if aware else [],
        answer=answer,
        needed=np.zeros(len(context), bool),
        scored=np.zeros(len(answer), int),
        labels=(),
        bytes=len(sample.answer.encode()),
    )


def _around(text: Text, context: str, chat: bool) -> tuple[str, str]:
    """What is read before the question, and what the template writes behind it."""
    if not chat:
        return context, "\n"
    mark = "\n" + "#" * len(context)  # longer than any such line of the context
    try:
        shown = text.render([{"role": "user", "content": context + mark}], enable_thinking=False)
    except ValueError as error:
        raise EvalError(f"{error} Give --raw to ask without the template.") from error
    before, found, after = shown.partition(mark)
    if not found:
        raise EvalError("The model's chat template does not show the user's words. Give --raw.")
    return before, after
