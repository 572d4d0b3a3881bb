"""From the outcomes of a cell's samples to its row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax import metrics
from kvjax.algebra import Policy
from kvjax.catalogue import describe
from kvjax.eval.measure.batch import Batch, Outcome
from kvjax.eval.measure.forced import READ_KINDS
from kvjax.eval.measure.grid import FULL
from kvjax.eval.measure.protocol import switches
from kvjax.eval.measure.row import Bytes, Cell, Each, Example, Reads, Reference, Row, short
from kvjax.eval.measure.store import named, versions
from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.sample import Samples
from kvjax.eval.tasks.task import Task
from kvjax.loading import LanguageModel

INFORMATIVE = 0.8
"""The full cache must reach this score for a cell to say anything about a policy."""


def row(
    cell: Cell,
    task: Task,
    policy: Policy,
    model: LanguageModel,
    samples: Samples,
    batches: list[Batch],
    full: Row | None,
    data: str,
) -> Row:
    """The row of a cell, numbers to six significant digits.

    Args:
      cell, task, policy, model: what was measured.
      samples: in order.
      batches: their outcomes, in order.
      full: the row of the full cache on the same samples; None if this row is the full cache's.
      data: where texts came from.
    """
    outcomes = [outcome for batch in batches for outcome in batch.outcomes]
    each = _each(task, model, samples, outcomes)
    # Live slots and φ are what a step reads; what the selection looks at to choose is counted apart.
    reads = Reads(
        **dict(zip(READ_KINDS, np.mean([o.reads for o in outcomes], axis=0))),
        summary_paper=batches[0].summary,
    )
    measured = short(
        Row(
            cell=cell,
            policy=describe(policy),
            group=task.group,
            metric=task.metric,
            model=named(model),
            data=data,
            switches=switches(policy, cell.protocol),
            **_totals(task, samples, outcomes, each),
            kept_fraction=float(np.mean([o.kept for o in outcomes])),
            peak_fraction=float(np.max([o.peak for o in outcomes])),
            mean_fraction=float(np.mean([o.mean for o in outcomes])),
            reads_per_step=reads.slots + reads.summary,
            reads=reads,
            span_retention=_mean(each.retention),
            bytes=_bytes(model, samples, batches, outcomes),
            heads=np.mean([o.heads for o in outcomes], axis=0).tolist(),
            each=each,
            example=_example(policy, model, samples, outcomes),
            full=Reference(score=None, nll=0.0, perplexity=None),
            informative=False,
            versions=versions(),
        )
    )
    reference = measured if full is None else full
    return dataclasses.replace(
        measured,
        full=Reference(score=reference.score, nll=reference.nll, perplexity=reference.perplexity),
        informative=reference.score is None or reference.score >= INFORMATIVE,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _each(task: Task, model: LanguageModel, samples: Samples, outcomes: list[Outcome]) -> Each:
    texts = [o.output.lstrip("\n").split("\n")[0] if task.newline else o.output for o in outcomes]
    if task.score is not None:
        scores: list[Any] = [task.score(text, sample) for text, (sample, _) in zip(texts, samples)]
    else:
        found = [o.recalled if o.own is None else o.own for o in outcomes]
        scores = [float(one.mean()) if task.metric == "recall" else None for one in found]
    ranked = digits = None
    if any(o.label is not None for o in outcomes):
        ranked = [
            None if o.label is None else float(sample.labels[o.label] == sample.answer)
            for o, (sample, _) in zip(outcomes, samples)
        ]
    if all(len(sample.refs) == 1 and sample.refs[0].isdecimal() for sample, _ in samples):
        digits = [scorers.digits_right(t, sample.refs[0]) for t, (sample, _) in zip(texts, samples)]
    tags = sorted({tag for sample, _ in samples for tag in sample.tags})
    return Each(
        score=scores,
        nll=[o.nll for o in outcomes],
        tokens=[o.tokens for o in outcomes],
        kept=[o.kept for o in outcomes],
        live=[o.live for o in outcomes],
        peak_live=[o.peak_live for o in outcomes],
        retention=[o.retention for o in outcomes],
        ranked=ranked,
        output=None if task.score is None else texts,
        digits=digits,
        tags={tag: [sample.tags.get(tag) for sample, _ in samples] for tag in tags},
        found=[o.recalled.astype(int).tolist() for o in outcomes] if task.metric == "recall" else None,
        written=_written(task, model, texts, samples, outcomes),
        kl=[float(o.kl) for o in outcomes if o.kl is not None] or None,
        top=[float(o.top) for o in outcomes if o.top is not None] or None,
    )


def _written(
    task: Task, model: LanguageModel, texts: list[str], samples: Samples, outcomes: list[Outcome]
) -> list[int] | None:
    """Tokens of each answer; where a line break ended its text, those of the text alone."""
    if task.long:
        return [len(encoded.answer) for _, encoded in samples]
    if task.score is None:
        return None
    whole = [text == outcome.output for text, outcome in zip(texts, outcomes)]
    lengths = [len(model.text.encode(text, bos=False)) for text in texts]
    return [o.written if all_ else min(n, o.written) for o, all_, n in zip(outcomes, whole, lengths)]


def _totals(task: Task, samples: Samples, outcomes: list[Outcome], each: Each) -> dict[str, Any]:
    nats = sum(o.nll * o.tokens for o in outcomes)
    text = task.metric == "perplexity"
    return {
        "score": _mean(each.score),
        "nll": float(np.mean(each.nll)),
        "ranked": _mean(each.ranked or []),
        "digits": _mean(list(each.digits or [])),
        "perplexity": math.exp(nats / sum(o.tokens for o in outcomes)) if text else None,
        "bits_per_byte": nats / math.log(2) / sum(e.bytes for _, e in samples) if text else None,
    }


def _bytes(model: LanguageModel, samples: Samples, batches: list[Batch], outcomes: list[Outcome]) -> Bytes:
    sizes = [len(e.context) + len(e.question) + len(e.prefix) for _, e in samples]
    share = [len(batch.outcomes) / len(outcomes) for batch in batches]
    full = [metrics.full_bytes(model.network, n, model.params["embed"].dtype) for n in sizes]
    return Bytes(
        live=float(np.mean([o.live for o in outcomes])),
        peak_live=float(np.mean([o.peak_live for o in outcomes])),
        allocated=float(np.dot(share, [batch.allocated for batch in batches])),
        peak_allocated=float(np.dot(share, [batch.peak_allocated for batch in batches])),
        prefill_live=float(np.dot(share, [batch.peak_bytes for batch in batches])),
        full=float(np.mean(full)),
    )


def _example(policy: Policy, model: LanguageModel, samples: Samples, outcomes: list[Outcome]) -> Example:
    held = outcomes[0].held.tolist()
    if policy != FULL:
        return Example(held=held)
    sample, encoded = samples[0]
    pieces = [model.text.decode([token]) for token in encoded.context + encoded.question]
    needed = encoded.needed.astype(int).tolist()
    return Example(held=held, pieces=pieces, needed=needed, answer=sample.answer)
