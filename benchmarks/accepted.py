"""``accepted``: how many drafted tokens stand in the embedded model's text, by draft, task and temperature.

Prompts are those of evaluation tasks (``kvjax.eval.tasks``) at a length; the model writes on behind them, and
every round drafts ``MOST`` tokens. Acceptance is that of tokens that follow accepted ones, a of the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import catalogue, decode
from kvjax.decode import DecodeRows
from kvjax.decode import _draft as rounds
from kvjax.eval import tasks
from kvjax.eval.measure import runner
from kvjax.eval.tasks.data import find
from kvjax.loading import LanguageModel
from kvjax.sampling import sampling
from kvjax.types import EMPTY

MOST = 4
"""Tokens of a draft."""


def rows(
    model: LanguageModel,
    targets: Sequence[str],
    drafts: Sequence[str],
    names: Sequence[str],
    *,
    length: int,
    temperatures: Sequence[float],
    count: int,
    tokens: int,
) -> Iterator[dict[str, Any]]:
    """A row for each target, draft, task and temperature.

    Args:
      model: that writes.
      targets: policies that are drafted for.
      drafts: selections.
      names: of tasks, whose samples up to the answer are the prompts.
      length: of prompt and text.
      temperatures: of sampling.
      count: prompts of a task, a batch.
      tokens: that are written behind each.
    """
    data = find()
    for task in tasks.named(list(names), data)[0]:
        drawn = runner.draw(task, model, data, length=length - tokens, seed=0, count=count)
        prompts = [(e.context + e.question + e.prefix + e.answer)[: length - tokens] for _, e in drawn]
        for target in targets:
            for draft in drafts:
                policy = decode.with_draft(catalogue.policy(target), f"draft({draft}, most={MOST})")
                for temperature in temperatures:
                    where = {"target": target, "draft": draft, "task": task.name, "context": length}
                    yield (
                        where
                        | {"temperature": temperature}
                        | _one(model, policy, prompts, temperature, tokens)
                    )


def _one(
    model: LanguageModel, policy: Any, prompts: list[list[int]], temperature: float, tokens: int
) -> dict[str, Any]:
    """Acceptance over all prompts, each written on by so many tokens."""
    context = decode.bucket(max(map(len, prompts)) + tokens, model.network.max_positions)
    state, logits = decode.prefill(model, policy, prompts, context=context)
    state = decode.reserve(policy, state, tokens, 1, ahead=tokens)
    count = len(prompts)
    rows = DecodeRows(
        token=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        done=jnp.zeros(count, bool),
        left=jnp.full(count, tokens, jnp.int32),
        stops=jnp.full(1, EMPTY, jnp.int32),
        how=sampling(count, temperature=temperature),
    )
    how: tuple[Any, ...] = (
        model.network,
        policy,
        tokens,
        MOST,
        model.params,
        {},
        state,
        rows,
        np.int32(tokens),
    )
    *_, tally = rounds.drafted_steps(*how)
    seen = jax.device_get(tally)
    judged, stood = int(seen.judged.sum()), int(seen.accepted.sum())
    each = (seen.accepted / np.maximum(seen.judged, 1)).tolist()
    return {
        "rows": count,
        "judged": judged,
        "accepted": round(stood / judged, 4),
        "each": [round(share, 4) for share in each],
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['target']:28} {row['draft']:26} {row['task']:14} {row['context']:5} "
        f"T={row['temperature']:.1f}  a={row['accepted']:.3f}  ({row['judged']} judged)"
    )
