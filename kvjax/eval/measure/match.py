"""Matched memory: the budget at which a policy holds as many live bytes as another one.

Bytes are the mean over samples of a sequence's peak from the moment the answer begins. INT8 slots count with
their scales, so that policies of different storage are compared by the bytes they really hold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from kvjax import decode
from kvjax.algebra import Policy, PolicyError
from kvjax.catalogue import policy as parse_policy
from kvjax.eval.errors import EvalError
from kvjax.eval.measure import batch, runner
from kvjax.eval.measure.batch import Batch
from kvjax.eval.tasks.sample import Samples
from kvjax.loading import LanguageModel
from kvjax.weights import Sources, find

TOLERANCE = 0.02
TRIES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean bytes of one row: live at its highest while answering, allocated when the answer begins, and the
    highest allocation, prefill included."""

    live: float
    allocated: float
    peak_allocated: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """A budget in tokens a KV head: its policy, its bytes, and live bytes over the target, less 1."""

    tokens: int
    policy: str
    held: Measured
    off: float


def search(
    measure: Callable[[int], float], target: float, *, first: int, least: int = 1
) -> tuple[int, float]:
    """The whole number whose measure is nearest to ``target``; each number is measured once.

    Args:
      measure: grows with its argument.
      target: of the measure.
      first: a guess.
      least: the smallest number to try.

    Returns:
      (number, its measure); within ``TOLERANCE`` where any whole number is.
    """
    known: dict[int, float] = {}
    number = max(least, first)
    for _ in range(TRIES):
        known[number] = measure(number)
        if abs(known[number] / target - 1) <= TOLERANCE:
            break
        number = _next(known, target, least)
        if number in known:
            break
    best = min(known, key=lambda tokens: abs(known[tokens] - target))
    return best, known[best]


def _next(known: dict[int, float], target: float, least: int) -> int:
    """The next number to try: inside a bracket by its chord, kept off its ends; else by proportion."""
    under = [tokens for tokens, size in known.items() if size <= target]
    over = [tokens for tokens, size in known.items() if size > target]
    if not under or not over:
        edge = min(over, default=0) or max(under)
        guess = round(edge * target / known[edge])
        return max(least, max(guess, edge + 1) if under else min(guess, edge - 1))
    low, high = max(under), min(over)
    share = (target - known[low]) / (known[high] - known[low])
    inside = min(max(share, 0.1), 0.9) if high - low > 8 else share
    return min(max(round(low + inside * (high - low)), low + 1), max(high - 1, low))


def measured(
    model: LanguageModel,
    policy: Policy,
    samples: Samples,
    *,
    length: int,
    protocol: str = "agnostic",
    weights: Sources = None,
) -> Measured:
    """Bytes that a policy holds on these samples; ``weights`` are for its learned parts."""
    rows, parts = runner.batched(samples, length)
    most = model.network.max_positions
    context, learned = decode.bucket(length, most), find(policy, model, weights).weights
    batches: list[Batch] = [
        batch.run(model, policy, part, protocol=protocol, context=context, rows=rows, weights=learned)
        for part in parts
    ]
    share = [len(b.outcomes) / len(samples) for b in batches]
    return Measured(
        live=float(np.mean([o.peak_live for b in batches for o in b.outcomes])),
        allocated=float(np.dot(share, [b.allocated for b in batches])),
        peak_allocated=float(np.dot(share, [b.peak_allocated for b in batches])),
    )


def matched(
    model: LanguageModel,
    template: str,
    target: float,
    samples: Samples,
    *,
    length: int,
    protocol: str = "agnostic",
    weights: Sources = None,
) -> Match:
    """The budget of a policy that holds ``target`` live bytes a row.

    Args:
      model, samples, length, protocol, weights: as in ``measured``.
      template: a policy with {} in place of its tokens, such as "snapkv + uniform({})".
      target: bytes.

    Raises:
      EvalError: no {} in the template, or no budget within 2 %.
    """
    if "{}" not in template:
        raise EvalError(
            f"--policy {template!r} has no budget to find. Write {{}} in its place: 'snapkv + uniform({{}})'."
        )
    held: dict[int, Measured] = {}
    of = functools.partial(
        measured, model, samples=samples, length=length, protocol=protocol, weights=weights
    )

    def measure(tokens: int) -> float:
        held[tokens] = of(parse_policy(template.format(tokens)))
        return held[tokens].live

    heads = model.network.num_layers * model.network.num_kv_heads
    slot = 2 * model.network.head_dim * model.params["embed"].dtype.itemsize
    tokens, live = search(measure, target, first=round(target / heads / slot), least=least(template, length))
    off = live / target - 1
    if abs(off) > TOLERANCE:
        raise EvalError(
            f"no budget of {template!r} comes within 2 % of {target:.0f} bytes; {tokens} tokens hold "
            f"{live:.0f} ({100 * off:+.1f} %). Choose another target, or protect fewer tokens."
        )
    return Match(
        tokens=tokens, policy=repr(parse_policy(template.format(tokens))), held=held[tokens], off=off
    )


def least(template: str, length: int) -> int:
    """The smallest budget the policy can be built with.

    Raises:
      PolicyError: none up to ``length`` can.
    """
    low, high = 1, length
    parse_policy(template.format(high))
    while low < high:
        middle = (low + high) // 2
        try:
            parse_policy(template.format(middle))
            high = middle
        except PolicyError:
            low = middle + 1
    return low
