"""One batch of samples through one policy: read, compress, ask, and all that is measured on the way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.eval.measure import counted, forced
from kvjax.eval.measure.counted import Contents
from kvjax.eval.measure.forced import Steps
from kvjax.eval.measure.protocol import cut
from kvjax.eval.tasks.sample import Encoded, Sample
from kvjax.loading import LanguageModel
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

TAIL = 64
"""Tokens a chunk when question and prefix follow a compressed cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one sample gave.

    Attributes:
      output: what was written; "" where nothing was.
      nll: mean negative log-likelihood of the scored reference tokens, nats.
      tokens: how many they are.
      found: per scored span, were all its tokens the likeliest?
      label: the label with the highest length-normalised log-probability; None without labels.
      kept: live slots over tokens seen when the answer begins, mean over layers and KV heads.
      heads: the same per layer and KV head.
      peak, mean: of the kept fraction over the steps of the answer.
      reads: read per KV head and step, by ``reads.KINDS``.
      retention: share of (layer, head, needed token) held when the answer begins; None if none is needed.
      live, peak_live: bytes when the answer begins, and at their highest.
      held: per position, how many (layer, KV head) hold the token when the answer begins.
    """

    output: str
    nll: float
    tokens: int
    found: Bool[np.ndarray, " Q"]
    label: int | None
    kept: float
    heads: Float[np.ndarray, "L K"]
    peak: float
    mean: float
    reads: Float[np.ndarray, " R"]
    retention: float | None
    live: float
    peak_live: float
    held: Int[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The outcomes of a batch, and bytes that belong to all of it.

    Attributes:
      outcomes: one a sample.
      allocated: device bytes of the cache when the answer begins, a row.
      peak_allocated, peak_bytes: highest so far, prefill included, a row: allocated and live.
      summary: tokens that reading φ once costs by the paper's count; 0 without a completion part.
    """

    outcomes: list[Outcome]
    allocated: float
    peak_allocated: float
    peak_bytes: float
    summary: float


def run(
    model: LanguageModel,
    policy: Policy,
    samples: list[tuple[Sample, Encoded]],
    *,
    protocol: str,
    context: int,
    rows: int,
    weights: Params | None = None,
    reading: decode.PromptActivations | None = None,
) -> Batch:
    """Measures a batch.

    Args:
      model, policy, weights: as in ``decode.prefill``.
      samples: at most ``rows`` of them; fewer are filled up with copies of the first.
      protocol: see ``protocol``.
      context: size class of the samples' length.
      rows: B; one number for all batches of a cell, so that they share programs.
      reading: of the same prompts (``prompts``), for a policy that cuts them afterwards; else they are read.
    """
    filled = _filled(samples, rows)
    joined = _parted(filled, protocol)
    if reading is not None:
        fitted, _ = decode.cut(model, policy, reading, weights=weights)
    else:
        fitted, _ = decode.prefill(model, policy, [h for h, _ in joined], context=context, weights=weights)
    fitted = dataclasses.replace(fitted, chunk=TAIL)
    peak = np.asarray(fitted.peak)
    if any(len(tail) > 1 for _, tail in joined):
        state = decode.roomy(policy, fitted, TAIL, max(len(tail) - 1 for _, tail in joined))
        fitted, _ = decode.extend(model, policy, state, [t[:-1] for _, t in joined], weights=weights)
    last = [tail[-1] for _, tail in joined]
    steps = max(max(len(e.answer), s.max_new, *map(len, e.labels or [[]])) for s, e in filled)
    # What the device really gives, now and for the steps to come; they run on a copy with pools of few sizes.
    reserved = decode.reserve(policy, fitted, steps, 1)
    allocated = [metrics.allocated(state.layers) for state in (fitted, reserved)]
    state = decode.roomy(policy, reserved, 1, steps)
    before = counted.contents(state)

    answers = [e.answer for _, e in filled]
    feed = [[first, *answer[:-1]] for first, answer in zip(last, answers)]
    after, given = forced.steps(model, policy, state, feed, answers, forced=True, weights=weights)
    outputs = _written(model, policy, state, filled, last, weights)
    labels = _labels(model, policy, state, filled, last, weights)
    outcomes = [
        _outcome(i, encoded, before, given, outputs[i], labels[i]) for i, (_, encoded) in enumerate(samples)
    ]
    live = max(metrics.nbytes(s).total["live"] for s in (state, after))
    return Batch(
        outcomes=outcomes,
        allocated=allocated[0] / rows,
        peak_allocated=max(float(peak[1]), *allocated) / rows,
        peak_bytes=max(float(peak[0]), live) / rows,
        summary=max(metrics.summary_tokens(layer, by_bytes=False) for layer in state.layers),
    )


def prompts(samples: list[tuple[Sample, Encoded]], protocol: str, rows: int) -> list[list[int]]:
    """What a batch is prefilled with."""
    return [head for head, _ in _parted(_filled(samples, rows), protocol)]


def _filled(samples: list[tuple[Sample, Encoded]], rows: int) -> list[tuple[Sample, Encoded]]:
    return samples + samples[:1] * (rows - len(samples))


def _parted(samples: list[tuple[Sample, Encoded]], protocol: str) -> list[tuple[list[int], list[int]]]:
    """What is compressed and what follows it, of each sample.

    The last token before the answer is fed by a decode step: selection acts on the first answer token, too.
    """
    parts = [cut(encoded, protocol) for _, encoded in samples]
    return [(head, tail) if tail else (head[:-1], head[-1:]) for head, tail in parts]


def _written(
    model: LanguageModel,
    policy: Policy,
    state: KVState,
    filled: list[tuple[Sample, Encoded]],
    last: list[int],
    weights: Params | None,
) -> list[str]:
    """Greedy text of every row, up to its end token."""
    steps = [sample.max_new for sample, _ in filled]
    if not any(steps):
        return [""] * len(filled)
    _, found = forced.steps(
        model, policy, state, [[t] for t in last], [[0] * n for n in steps], forced=False, weights=weights
    )
    outputs = []
    for n, row in zip(steps, found.best):
        ids = row[:n].tolist()
        end = next((i for i, token in enumerate(ids) if token in model.spec.eos), n)
        outputs.append(model.text.decode(ids[:end]))
    return outputs


def _labels(
    model: LanguageModel,
    policy: Policy,
    state: KVState,
    filled: list[tuple[Sample, Encoded]],
    last: list[int],
    weights: Params | None,
) -> list[int | None]:
    """The likeliest label of every row, by mean log-probability of its tokens."""
    most = max(len(encoded.labels) for _, encoded in filled)
    if not most:
        return [None] * len(filled)
    scores = np.full((len(filled), most), -np.inf)
    for j in range(most):
        mine = [e.labels[j] if j < len(e.labels) else e.answer for _, e in filled]
        feed = [[first, *label[:-1]] for first, label in zip(last, mine)]
        _, found = forced.steps(model, policy, state, feed, mine, forced=True, weights=weights)
        for row, (_, encoded) in enumerate(filled):
            if j < len(encoded.labels):
                scores[row, j] = -found.nll[row, : len(mine[row])].mean()
    return [int(j) for j in scores.argmax(axis=1)]


def _outcome(
    row: int, encoded: Encoded, before: Contents, steps: Steps, output: str, label: int | None
) -> Outcome:
    count = len(encoded.answer)
    at = np.flatnonzero(encoded.scored >= 0)
    seen = int(before.length[row])
    slots = before.slots[:, row]
    mask = before.mask[:, row]
    fractions = steps.live[row, :count] / (seen + 1 + np.arange(count))
    most = max(slots.sum(), slots.size * steps.live[row, :count].max())
    missed = steps.best[row, at] != np.asarray(encoded.answer)[at]
    needed = np.zeros(mask.shape[-1], bool)
    needed[: len(encoded.needed)] = encoded.needed
    return Outcome(
        output=output,
        nll=float(steps.nll[row, at].mean()),
        tokens=len(at),
        found=np.bincount(encoded.scored[at], weights=missed) == 0,
        label=label,
        kept=float(slots.mean() / seen),
        heads=slots / seen,
        peak=float(fractions.max()),
        mean=float(fractions.mean()),
        reads=np.asarray(steps.reads[row, :count]).mean(axis=0),
        retention=counted.span_retention(mask, needed),
        live=before.bytes(float(slots.sum())),
        peak_live=before.bytes(float(most)),
        held=mask[:, :, :seen].sum(axis=(0, 1)),
    )
