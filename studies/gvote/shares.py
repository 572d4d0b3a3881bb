"""Which p keeps so many tokens: one number for all tasks, as a user would have to choose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax import decode, metrics
from kvjax.catalogue import policy as parse_policy
from kvjax.decode import PromptActivations
from kvjax.eval import tasks
from kvjax.eval.measure import batch, runner
from kvjax.eval.tasks.data import Data
from kvjax.loading import LanguageModel

FORMS = (
    "gvote({}, samples=8)",
    "gvote({}, samples=32)",
    "gvote({}, samples=64)",
    "gvote({}, samples=256)",
    "gvote({}, samples=8, queries=32)",
    "gvote({}, samples=256, queries=32)",
    "gvote({}, samples=inf)",
    "gvote({}, samples=inf, queries=32)",
    "gvote({}, samples=inf, nucleus=expected)",
)
"""Ways to count, their p left open."""
SHARES = (0.2, 0.3, 0.4)
STEPS = 12
"""Halvings of the interval of log(p / (1 - p))."""


def shares(
    model: LanguageModel,
    data: Data,
    names: Sequence[str],
    length: int,
    count: int,
    say: Callable[[str], None],
    forms: Sequence[str] = FORMS,
    *,
    protocol: str = "aware",
    chat: bool = False,
) -> dict[str, Any]:
    """p by form and share of the tokens kept, mean over tasks; ``count`` samples of each.

    The samples (seed 2) are not those of the configs. With ``chat`` they are asked through the template.
    """
    readings = []
    for task in tasks.named(list(names), data)[0]:
        how: dict[str, Any] = {"length": length, "seed": 2, "count": count, "chat": chat and task.asks}
        drawn = runner.draw(task, model, data, **how)
        prompts = batch.prompts(drawn, protocol, count)
        seeds = [batch.seed_of(encoded) for _, encoded in drawn]
        context = decode.bucket(length, model.network.max_positions)
        readings.append((decode.read_full(model, prompts, context=context), seeds))
    entries = []
    for form in forms:
        for share in SHARES:

            def kept(p: float, form: str = form) -> float:
                return float(np.mean([_kept(model, form.format(p), *reading) for reading in readings]))

            p, reached = solve(kept, share)
            entries.append({"policy": form.format(p), "p": p, "aim": share, "kept": reached})
            say(f"{form.format(p)} keeps {100 * reached:.1f} %")
    return {"tasks": list(names), "entries": entries}


def _kept(model: LanguageModel, spec: str, reading: PromptActivations, seeds: Sequence[int]) -> float:
    """Share of the tokens that stay, mean over samples, layers and KV heads."""
    state, _ = decode.cut(model, parse_policy(spec), reading, seeds=list(seeds))
    live = np.asarray(metrics.live_slots(state)).mean(axis=(0, 2))
    return float((live / np.asarray(state.length)).mean())


def solve(kept: Callable[[float], float], share: float) -> tuple[float, float]:
    """The p, of three digits behind the point, at which ``kept`` (growing in p) is nearest to ``share``."""
    low, high, tried = -7.0, 7.0, dict[float, float]()
    for _ in range(STEPS):
        middle = (low + high) / 2
        p = min(max(round(1 / (1 + float(np.exp(-middle))), 3), 0.001), 0.999)
        if p not in tried:
            tried[p] = kept(p)
        low, high = (middle, high) if tried[p] < share else (low, middle)
    best = min(tried, key=lambda p: abs(tried[p] - share))
    return best, tried[best]
