"""One batch of samples through one policy: read, compress, ask, and measure on the way."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import decode, metrics
from kvjax.algebra import Policy
from kvjax.cache.state import KVState
from kvjax.eval.measure import counted, forced
from kvjax.eval.measure.counted import Contents
from kvjax.eval.measure.forced import Steps
from kvjax.eval.measure.protocol import cut
from kvjax.eval.tasks.sample import Encoded, Samples
from kvjax.loading import LanguageModel
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

ROOM = 2 * 2**30
"""Most bytes of pools that would hold everything."""

TAIL = 32
"""Tokens a chunk when question and prefix follow a compressed cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measurements of one sample.

    Attributes:
      output: the text that was written; "" where nothing was.
      nll: mean negative log-likelihood of the scored reference tokens, nats.
      tokens: how many they are.
      recalled: per scored span, were all its tokens the likeliest?
      label: the label with the highest length-normalised log-probability; None without labels.
      kept: live slots over tokens seen when the answer begins, mean over layers and KV heads.
      heads: the same per layer and KV head.
      peak, mean: of the kept fraction over the steps of the reference, or of what was written (``free``).
      reads: read per KV head and step, by ``forced.READ_KINDS``.
      retention: share of (layer, head, needed token) held when the answer begins; None if none is needed.
      live, peak_live: bytes when the answer begins, and at their highest.
      held: per position, how many (layer, KV head) hold the token when the answer begins.
      written: tokens of the output, an end token included; 0 where nothing was written.
      own: as ``recalled`` where the scored tokens are the model's own and are fed back as it wrote them; None
        for tasks without long answers.
      kl, top: over the scored tokens, the mean divergence of the full cache's distribution from this one in
        nats, and the share with the same likeliest token; None where it is not compared.
    """

    output: str
    nll: float
    tokens: int
    recalled: Bool[np.ndarray, " Q"]
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
    written: int = 0
    own: Bool[np.ndarray, " Q"] | None = None
    kl: float | None = None
    top: float | None = None


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
    samples: Samples,
    *,
    protocol: str,
    context: int,
    rows: int,
    weights: Params | None = None,
    reading: decode.PromptActivations | None = None,
    reference: Float[jax.Array, "B T V"] | None = None,
    long: bool = False,
    free: bool = False,
) -> Batch:
    """Measures a batch.

    Args:
      model, policy, weights: as in ``decode.prefill``.
      samples: at most ``rows`` of them; copies of the first fill the batch.
      protocol: see ``protocol``.
      context: size class of the samples' length.
      rows: B; one number for all batches of a cell, so that they share programs.
      reading: full prefill of the same ``prompts``, for a policy that cuts it afterwards; None reads them.
      reference: of the same samples, to be compared with; None compares nothing.
      long: are the scored tokens also written by the model itself, between given ones?
      free: are fractions and reads those of the text that is written? Else of the reference's tokens.
    """
    filled = _filled(samples, rows)
    heads, tails = zip(*_split(filled, protocol))
    # Policies that draw (``gvote``) draw anew for each sample, and alike in every cell about it.
    draws: dict[str, Any] = {"weights": weights, "seeds": [seed_of(encoded) for _, encoded in filled]}
    if reading is not None:
        compressed, _ = decode.cut(model, policy, reading, **draws)
    else:
        compressed, _ = decode.prefill(model, policy, list(heads), context=context, **draws)
    peak = np.asarray(compressed.peak)
    compressed, last = _asked(model, policy, compressed, tails, weights)
    steps = max(max(len(e.answer), s.max_new, *map(len, e.labels or [[]])) for s, e in filled)
    # Allocated bytes are those of the device, now and for the steps to come. The steps themselves run on a
    # copy with larger pools, so that programs are shared.
    reserved = decode.reserve(policy, compressed, steps, 1)
    allocated = [metrics.allocated(state.layers) for state in (compressed, reserved)]
    state = _roomy(model, policy, reserved, 1, steps)
    before = counted.contents(state)

    def walk(answers: list[list[int]]) -> tuple[KVState, Steps]:
        feed = [[first, *answer[:-1]] for first, answer in zip(last, answers)]
        return forced.steps(
            model, policy, state, feed, answers, forced=True, weights=weights, reference=reference
        )

    def write(counts: list[int]) -> Steps:
        feed, targets = [[token] for token in last], [[0] * n for n in counts]
        return forced.steps(model, policy, state, feed, targets, forced=False, weights=weights)[1]

    def speak() -> Int[np.ndarray, "B T"]:
        """The likeliest tokens after each, where scored ones are the model's own."""
        answers = [e.answer for _, e in filled]
        feed = [[first, *answer[:-1]] for first, answer in zip(last, answers)]
        given = [[True, *(e.scored[:-1] < 0).tolist()] for _, e in filled]
        best = forced.steps(model, policy, state, feed, answers, forced=given, weights=weights)[1].best
        return np.asarray(best)

    after, measured = walk([e.answer for _, e in filled])
    spoken = speak() if long else None
    outputs, ends, written = _written(model, filled, write)
    walked, counts = measured, [len(e.answer) for _, e in filled]
    if free and written is not None:
        walked, counts = written, [max(1, end) for end in ends]
    labels = _labels(filled, walk)
    outcomes = [
        _outcome(i, encoded, before, measured, outputs[i], ends[i], labels[i], spoken, (walked, counts[i]))
        for i, (_, encoded) in enumerate(samples)
    ]
    live = max(metrics.nbytes(s).total["live"] for s in (state, after))
    return Batch(
        outcomes=outcomes,
        allocated=allocated[0] / rows,
        peak_allocated=max(float(peak[1]), *allocated) / rows,
        peak_bytes=max(float(peak[0]), live) / rows,
        summary=max(metrics.summary_tokens(layer, by_bytes=False) for layer in state.layers),
    )


def read(
    model: LanguageModel, samples: Samples, *, protocol: str, context: int, rows: int
) -> decode.PromptActivations:
    """The reading of a batch, for every policy that cuts it afterwards; arguments as in ``run``."""
    return decode.read_full(model, prompts(samples, protocol, rows), context=context)


def reference(
    model: LanguageModel, samples: Samples, *, protocol: str, context: int, rows: int
) -> Float[jax.Array, "B T V"]:
    """The full cache's logits at every token of the answers; arguments as in ``run``."""
    filled, full = _filled(samples, rows), Policy()
    heads, tails = zip(*_split(filled, protocol))
    state, _ = decode.prefill(model, full, list(heads), context=context)
    state, last = _asked(model, full, state, tails, None)
    answers = [e.answer for _, e in filled]
    most = max(map(len, answers))
    state = _roomy(model, full, decode.reserve(full, state, most, 1), 1, most)
    feed = [[first, *answer[:-1]] for first, answer in zip(last, answers)]
    return forced.logits(model, full, state, feed)


def _asked(
    model: LanguageModel,
    policy: Policy,
    state: KVState,
    tails: Sequence[list[int]],
    weights: Params | None,
) -> tuple[KVState, list[int]]:
    """The state with all but the last token of what follows the compressed prompts; these last tokens."""
    state = dataclasses.replace(state, chunk=TAIL)
    if any(len(tail) > 1 for tail in tails):
        state = _roomy(model, policy, state, TAIL, max(len(tail) - 1 for tail in tails))
        state, _ = decode.extend(model, policy, state, [tail[:-1] for tail in tails], weights=weights)
    return state, [tail[-1] for tail in tails]


def _roomy(model: LanguageModel, policy: Policy, state: KVState, arriving: int, tokens: int) -> KVState:
    """The state with pools of one size for all budgets, which then share programs; else of few sizes."""
    dtype = model.params["embed"].dtype
    whole = state.rows * metrics.full_bytes(model.network, state.context, dtype)
    return decode.roomy(policy, state, arriving, None if whole <= ROOM else tokens)


def seed_of(sample: Encoded) -> int:
    """The seed of a sample's request: a digest of its tokens, whatever the batch or the protocol."""
    return zlib.crc32(np.asarray(sample.context + sample.question, np.int64).tobytes())


def prompts(samples: Samples, protocol: str, rows: int) -> list[list[int]]:
    """The prompts that a batch prefills."""
    return [head for head, _ in _split(_filled(samples, rows), protocol)]


def _filled(samples: Samples, rows: int) -> Samples:
    return samples + samples[:1] * (rows - len(samples))


def _split(samples: Samples, protocol: str) -> list[tuple[list[int], list[int]]]:
    """Of each sample the tokens that are compressed and those that follow.

    A decode step feeds the last token before the answer: selection acts on the first answer token, too.
    """
    parts = [cut(encoded, protocol) for _, encoded in samples]
    return [(head, tail) if tail else (head[:-1], head[-1:]) for head, tail in parts]


def _written(
    model: LanguageModel, filled: Samples, write: Callable[[list[int]], Steps]
) -> tuple[list[str], list[int], Steps | None]:
    """Greedy text of every row, up to its end token; steps, with that of the end token; all measurements."""
    counts = [sample.max_new for sample, _ in filled]
    if not any(counts):
        return [""] * len(filled), [0] * len(filled), None
    steps = write(counts)
    outputs, ends = [], []
    for n, row in zip(counts, steps.best):
        ids = row[:n].tolist()
        end = next((i for i, token in enumerate(ids) if token in model.spec.eos), n)
        outputs.append(model.text.decode(ids[:end]))
        ends.append(min(end + 1, n))
    return outputs, ends, steps


def _labels(filled: Samples, walk: Callable[[list[list[int]]], tuple[KVState, Steps]]) -> list[int | None]:
    """The likeliest label of every row, by mean log-probability of its tokens."""
    most = max(len(encoded.labels) for _, encoded in filled)
    if not most:
        return [None] * len(filled)
    scores = np.full((len(filled), most), -np.inf)
    for j in range(most):
        labels = [e.labels[j] if j < len(e.labels) else e.answer for _, e in filled]
        nll = walk(labels)[1].nll
        for row, (_, encoded) in enumerate(filled):
            if j < len(encoded.labels):
                scores[row, j] = -nll[row, : len(labels[row])].mean()
    return [int(j) for j in scores.argmax(axis=1)]


def _right(encoded: Encoded, best: Int[np.ndarray, " T"]) -> Bool[np.ndarray, " Q"]:
    """Of each scored span, are all its tokens these?"""
    at = np.flatnonzero(encoded.scored >= 0)
    missed = best[at] != np.asarray(encoded.answer)[at]
    return np.bincount(encoded.scored[at], weights=missed) == 0


def _outcome(
    row: int,
    encoded: Encoded,
    before: Contents,
    steps: Steps,
    output: str,
    written: int,
    label: int | None,
    spoken: Int[np.ndarray, "B T"] | None,
    walked: tuple[Steps, int],
) -> Outcome:
    over, count = walked
    at = np.flatnonzero(encoded.scored >= 0)
    seen = int(before.length[row])
    slots = before.slots[:, row]
    mask = before.mask[:, row]
    fractions = over.live[row, :count] / (seen + 1 + np.arange(count))
    most = max(slots.sum(), slots.size * over.live[row, :count].max())
    needed = np.zeros(mask.shape[-1], bool)
    needed[: len(encoded.needed)] = encoded.needed
    return Outcome(
        output=output,
        nll=float(steps.nll[row, at].mean()),
        tokens=len(at),
        recalled=_right(encoded, np.asarray(steps.best[row])),
        label=label,
        kept=float(slots.mean() / seen),
        heads=slots / seen,
        peak=float(fractions.max()),
        mean=float(fractions.mean()),
        reads=np.asarray(over.reads[row, :count]).mean(axis=0),
        retention=counted.span_retention(mask, needed),
        live=before.bytes(float(slots.sum())),
        peak_live=before.bytes(float(most)),
        held=mask[:, :, :seen].sum(axis=(0, 1)),
        written=written,
        own=None if spoken is None else _right(encoded, spoken[row]),
        kl=None if steps.kl is None else float(steps.kl[row, at].mean()),
        top=None if steps.top is None else float(steps.top[row, at].mean()),
    )
