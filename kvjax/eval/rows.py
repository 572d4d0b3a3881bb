"""From outcomes to the row of a cell."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax import metrics
from kvjax.algebra import Policy
from kvjax.eval import scorers, walk
from kvjax.eval.batch import Batch, Outcome
from kvjax.eval.cells import FULL, Cell
from kvjax.eval.protocol import switches
from kvjax.eval.sample import Encoded, Sample, Task
from kvjax.eval.store import Row, named, versions
from kvjax.loading import LanguageModel

INFORMATIVE = 0.8
"""Share of the ceiling that the full cache must reach for a cell to say anything about a policy."""


def short(value: Any) -> Any:
    """Floats to six significant digits, in trees of lists and dicts."""
    if isinstance(value, dict):
        return {name: short(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(x) for x in value]
    if isinstance(value, np.ndarray):
        return short(value.tolist())
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.6g}")
    return int(value) if isinstance(value, np.integer) else value


def row(
    cell: Cell,
    task: Task,
    policy: Policy,
    model: LanguageModel,
    samples: list[tuple[Sample, Encoded]],
    batches: list[Batch],
    full: Row | None,
    data: str,
) -> Row:
    """One JSON object.

    Args:
      cell, task, policy, model: what was measured.
      samples: in order.
      batches: their outcomes, in order.
      full: the row of the full cache on the same samples; None where this is it.
      data: where texts came from.
    """
    found = [outcome for batch in batches for outcome in batch.outcomes]
    each = _each(task, samples, found)
    total = _totals(task, samples, found, each)
    made: Row = {
        "cell": dataclasses.asdict(cell),
        "group": task.group,
        "metric": task.metric,
        "model": named(model),
        "data": data,
        "switches": switches(policy, cell.protocol),
        **total,
        "kept_fraction": np.mean([o.kept for o in found]),
        "peak_fraction": np.max([o.peak for o in found]),
        "mean_fraction": np.mean([o.mean for o in found]),
        **_reads(batches, found),
        "span_retention": _mean(each["retention"]),
        "bytes": _bytes(model, samples, batches, found),
        "heads": np.mean([o.heads for o in found], axis=0),
        "each": each,
        "example": {"held": found[0].held},
    }
    if policy == FULL:
        pieces = [model.text.decode([token]) for token in samples[0][1].context + samples[0][1].question]
        needed = samples[0][1].needed.astype(int)
        made["example"] |= {"pieces": pieces, "needed": needed, "answer": samples[0][0].answer}
    made = short(made)
    reference = made if full is None else full
    made["full"] = {name: reference[name] for name in ("score", "nll", "perplexity")}
    made["informative"] = reference["score"] is None or reference["score"] >= INFORMATIVE
    return made | {"versions": versions()}


def _reads(batches: list[Batch], found: list[Outcome]) -> dict[str, Any]:
    """What a decode step loads per KV head, in tokens: live slots and φ; what chooses them stands apart."""
    mean = dict(zip(walk.READS, np.mean([o.reads for o in found], axis=0)))
    loaded = mean["slots"] + mean["summary"]
    return {"reads_per_step": loaded, "reads": mean | {"summary_paper": batches[0].summary}}


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def _each(task: Task, samples: list[tuple[Sample, Encoded]], found: list[Outcome]) -> dict[str, list[Any]]:
    """Per sample, in order: what pairs and intervals are made of."""
    texts = [o.output.lstrip("\n").split("\n")[0] if task.newline else o.output for o in found]
    if task.score is not None:
        scores: list[Any] = [task.score(text, sample) for text, (sample, _) in zip(texts, samples)]
    else:
        scores = [float(o.found.mean()) if task.metric == "recall" else None for o in found]
    each: dict[str, list[Any]] = {
        "score": scores,
        "nll": [o.nll for o in found],
        "tokens": [o.tokens for o in found],
        "kept": [o.kept for o in found],
        "live": [o.live for o in found],
        "peak_live": [o.peak_live for o in found],
        "retention": [o.retention for o in found],
    }
    if any(o.label is not None for o in found):
        each["ranked"] = [
            None if o.label is None else float(sample.labels[o.label] == sample.answer)
            for o, (sample, _) in zip(found, samples)
        ]
    if task.score is not None:
        each["output"] = texts
    if all(len(sample.refs) == 1 and sample.refs[0].isdecimal() for sample, _ in samples):
        each["digits"] = [scorers.digits_right(t, sample.refs[0]) for t, (sample, _) in zip(texts, samples)]
    for tag in sorted({tag for sample, _ in samples for tag in sample.tags}):
        each[tag] = [sample.tags.get(tag) for sample, _ in samples]
    if task.metric == "recall":
        each["found"] = [o.found.astype(int).tolist() for o in found]
    return each


def _totals(
    task: Task, samples: list[tuple[Sample, Encoded]], found: list[Outcome], each: dict[str, list[Any]]
) -> dict[str, Any]:
    nats = sum(o.nll * o.tokens for o in found)
    text = task.metric == "perplexity"
    return {
        "score": _mean(each["score"]),
        "nll": _mean(each["nll"]),
        "ranked": _mean(each.get("ranked", [])),
        "digits": _mean(each.get("digits", [])),
        "perplexity": math.exp(nats / sum(o.tokens for o in found)) if text else None,
        "bits_per_byte": nats / math.log(2) / sum(e.bytes for _, e in samples) if text else None,
    }


def _bytes(
    model: LanguageModel, samples: list[tuple[Sample, Encoded]], batches: list[Batch], found: list[Outcome]
) -> dict[str, float]:
    """Bytes of one row of the cache, means over samples, when the answer begins or at their highest."""
    sizes = [len(e.context) + len(e.question) + len(e.prefix) for _, e in samples]
    share = [len(batch.outcomes) / len(found) for batch in batches]
    full = [metrics.full_bytes(model.network, n, model.params["embed"].dtype) for n in sizes]
    return {
        "live": float(np.mean([o.live for o in found])),
        "peak_live": float(np.mean([o.peak_live for o in found])),
        "allocated": float(np.dot(share, [batch.allocated for batch in batches])),
        "peak_allocated": float(np.dot(share, [batch.peak_allocated for batch in batches])),
        "prefill_live": float(np.dot(share, [batch.peak_bytes for batch in batches])),
        "full": float(np.mean(full)),
    }
