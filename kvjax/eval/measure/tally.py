"""From the outcomes of a cell's samples to its row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax import metrics
from kvjax.algebra import Policy
from kvjax.catalogue import describe
from kvjax.eval.measure import reads
from kvjax.eval.measure.batch import Batch, Outcome
from kvjax.eval.measure.grid import FULL
from kvjax.eval.measure.protocol import switches
from kvjax.eval.measure.row import Bytes, Cell, Each, Example, Reads, Reference, Row, short
from kvjax.eval.measure.store import named, versions
from kvjax.eval.tasks import scorers
from kvjax.eval.tasks.sample import Samples
from kvjax.eval.tasks.task import Task
from kvjax.loading import LanguageModel

INFORMATIVE = 0.8
"""Share of the ceiling that the full cache must reach for a cell to say anything about a policy."""


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
      full: the row of the full cache on the same samples; None where this is it.
      data: where texts came from.
    """
    found = [outcome for batch in batches for outcome in batch.outcomes]
    each = _each(task, samples, found)
    made = Row(
        cell=cell,
        policy=describe(policy),
        group=task.group,
        metric=task.metric,
        model=named(model),
        data=data,
        switches=switches(policy, cell.protocol),
        **_totals(task, samples, found, each),
        kept_fraction=float(np.mean([o.kept for o in found])),
        peak_fraction=float(np.max([o.peak for o in found])),
        mean_fraction=float(np.mean([o.mean for o in found])),
        **_reads(batches, found),
        span_retention=_mean(each.retention),
        bytes=_bytes(model, samples, batches, found),
        heads=np.mean([o.heads for o in found], axis=0).tolist(),
        each=each,
        example=_example(policy, model, samples, found),
        full=Reference(score=None, nll=0.0, perplexity=None),
        informative=False,
        versions=versions(),
    )
    made = short(made)
    reference = made if full is None else full
    return dataclasses.replace(
        made,
        full=Reference(score=reference.score, nll=reference.nll, perplexity=reference.perplexity),
        informative=reference.score is None or reference.score >= INFORMATIVE,
    )


def _reads(batches: list[Batch], found: list[Outcome]) -> dict[str, Any]:
    """What a decode step loads per KV head, in tokens: live slots and φ; what chooses them stands apart."""
    mean = dict(zip(reads.KINDS, np.mean([o.reads for o in found], axis=0)))
    apart = Reads(**mean, summary_paper=batches[0].summary)
    return {"reads_per_step": apart.slots + apart.summary, "reads": apart}


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def _each(task: Task, samples: Samples, found: list[Outcome]) -> Each:
    texts = [o.output.lstrip("\n").split("\n")[0] if task.newline else o.output for o in found]
    if task.score is not None:
        scores: list[Any] = [task.score(text, sample) for text, (sample, _) in zip(texts, samples)]
    else:
        scores = [float(o.found.mean()) if task.metric == "recall" else None for o in found]
    ranked = digits = None
    if any(o.label is not None for o in found):
        ranked = [
            None if o.label is None else float(sample.labels[o.label] == sample.answer)
            for o, (sample, _) in zip(found, samples)
        ]
    if all(len(sample.refs) == 1 and sample.refs[0].isdecimal() for sample, _ in samples):
        digits = [scorers.digits_right(t, sample.refs[0]) for t, (sample, _) in zip(texts, samples)]
    tags = sorted({tag for sample, _ in samples for tag in sample.tags})
    return Each(
        score=scores,
        nll=[o.nll for o in found],
        tokens=[o.tokens for o in found],
        kept=[o.kept for o in found],
        live=[o.live for o in found],
        peak_live=[o.peak_live for o in found],
        retention=[o.retention for o in found],
        ranked=ranked,
        output=None if task.score is None else texts,
        digits=digits,
        tags={tag: [sample.tags.get(tag) for sample, _ in samples] for tag in tags},
        found=[o.found.astype(int).tolist() for o in found] if task.metric == "recall" else None,
    )


def _totals(task: Task, samples: Samples, found: list[Outcome], each: Each) -> dict[str, Any]:
    nats = sum(o.nll * o.tokens for o in found)
    text = task.metric == "perplexity"
    return {
        "score": _mean(each.score),
        "nll": float(np.mean(each.nll)),
        "ranked": _mean(each.ranked or []),
        "digits": _mean(list(each.digits or [])),
        "perplexity": math.exp(nats / sum(o.tokens for o in found)) if text else None,
        "bits_per_byte": nats / math.log(2) / sum(e.bytes for _, e in samples) if text else None,
    }


def _bytes(model: LanguageModel, samples: Samples, batches: list[Batch], found: list[Outcome]) -> Bytes:
    sizes = [len(e.context) + len(e.question) + len(e.prefix) for _, e in samples]
    share = [len(batch.outcomes) / len(found) for batch in batches]
    full = [metrics.full_bytes(model.network, n, model.params["embed"].dtype) for n in sizes]
    return Bytes(
        live=float(np.mean([o.live for o in found])),
        peak_live=float(np.mean([o.peak_live for o in found])),
        allocated=float(np.dot(share, [batch.allocated for batch in batches])),
        peak_allocated=float(np.dot(share, [batch.peak_allocated for batch in batches])),
        prefill_live=float(np.dot(share, [batch.peak_bytes for batch in batches])),
        full=float(np.mean(full)),
    )


def _example(policy: Policy, model: LanguageModel, samples: Samples, found: list[Outcome]) -> Example:
    held = found[0].held.tolist()
    if policy != FULL:
        return Example(held=held)
    sample, encoded = samples[0]
    pieces = [model.text.decode([token]) for token in encoded.context + encoded.question]
    needed = encoded.needed.astype(int).tolist()
    return Example(held=held, pieces=pieces, needed=needed, answer=sample.answer)
