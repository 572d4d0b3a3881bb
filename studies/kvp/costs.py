"""What rankings cost on held-out traces, by layer and KV head: trained agents beside what learns nothing.

The cost of a budget is the share of the future attention that it evicts; the area of a ranking is its mean
over all budgets. The oracle ranks by that attention itself (``train.ranker``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.policies import kvp
from kvjax.types import Params
from train.ranker import batches, objective, rankings
from train.ranker.objective import Task
from train.ranker.settings import Settings
from train.trace_file import Traces

if TYPE_CHECKING:
    from jaxtyping import Array, Float

SHARES = tuple(i / 32 for i in range(33))
"""Budgets of a curve, as shares of the ranked tokens."""

FREE = ("random", "recency", "lagkv", "keydiff", "knorm")
"""Rankings that see no attention, as StreamingLLM (recency) and three of keys and values do."""

PRIVILEGED = ("tova", "snapkv")
"""They read the cache's last queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Of every held-out sequence, in order.

    Attributes:
      tasks: what each is.
      areas: by ranking, "oracle" among them.
      curves: of the same, what budgets of ``SHARES`` evict of the attention to ranked tokens.
    """

    tasks: Sequence[str]
    areas: Mapping[str, Float[np.ndarray, "n L K"]]
    curves: Mapping[str, Float[np.ndarray, "n L K S"]]

    def of(self, kinds: Sequence[str]) -> Costs:
        """The sequences of these kinds."""
        chosen_kinds = np.asarray([batches.kind(task) in kinds for task in self.tasks])
        chosen = lambda found: {name: x[chosen_kinds] for name, x in found.items()}  # noqa: E731
        tasks = [task for task, wanted in zip(self.tasks, chosen_kinds) if wanted]
        return Costs(tasks=tasks, areas=chosen(self.areas), curves=chosen(self.curves))


def measured(traces: Traces, settings: Settings, rankers: Mapping[str, Params]) -> Costs:
    """All rankings on every held-out sequence, cut where the checks of training cut it.

    Caches shorter than the window of the privileged are left out.

    Args:
      traces: with all queries stored.
      settings: of a run; its ``agent`` says what is protected and which keys are read.
      rankers: agents on raw inputs, leaves [A, ...], by name.
    """
    about = traces.manifest
    task = Task(agent=settings.agent, method=settings.method, softcap=about.softcap)
    tasks, areas, curves = traces.tasks(), [], []
    used = batches.used(traces, settings, held=True)
    kept = []
    for index, batch in zip(used.tolist(), batches.held(traces, settings)):
        if "seen" not in batch:
            continue
        area, curve = jax.device_get(_costs(task, about.layers, dict(rankers), batch))
        kept.append(tasks[index])
        areas.append(area)
        curves.append(curve)
    shape = (len(kept), about.layers, about.kv_heads)
    whole = lambda parts: {name: np.stack([p[name] for p in parts]) for name in parts[0]}  # noqa: E731
    return Costs(
        tasks=kept,
        areas={name: x.reshape(shape) for name, x in whole(areas).items()},
        curves={name: x.reshape(*shape, len(SHARES)) for name, x in whole(curves).items()},
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _costs(
    task: Task, layers: int, rankers: dict[str, Params], batch: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    pos = jnp.arange(batch["v"].shape[2])[None]
    scores = {
        name: kvp.scores(agents, batch["k"], batch.get("k_pre"), batch["v"], pos)
        for name, agents in rankers.items()
    }
    worth, count, orders = objective.orders(task, layers, scores, batch)
    areas = {name: rankings.area(worth, order, count) for name, order in orders.items()}
    curves = {name: curve(worth, order, count) for name, order in orders.items()}
    areas["random"] = jnp.full(count.shape, 0.5)  # expectations
    curves["random"] = jnp.broadcast_to(1 - jnp.asarray(SHARES), curves["oracle"].shape)
    return {name: x[0] for name, x in areas.items()}, {name: x[0] for name, x in curves.items()}


def curve(worth: Float[Array, "B A T"], order: Array, ranked: Float[Array, "B A"]) -> Float[Array, "B A S"]:
    """The share of all importance that budgets of ``SHARES`` of the ranked tokens evict."""
    kept = jnp.cumsum(jnp.take_along_axis(worth, order, axis=-1), axis=-1)
    kept = jnp.concatenate([jnp.zeros_like(kept[..., :1]), kept], axis=-1)
    at = jnp.round(jnp.asarray(SHARES) * ranked[..., None]).astype(jnp.int32)
    total = kept[..., -1:]
    return 1 - jnp.take_along_axis(kept, at, axis=-1) / jnp.where(total > 0, total, 1.0)


def stacked(layers: Sequence[Params]) -> Params:
    """A file's rankers, a dict a layer, as one with leaves [A, ...]."""
    return {name: jnp.concatenate([layer[name] for layer in layers]) for name in layers[0]}


def over_oracle(areas: Mapping[str, Any]) -> dict[str, Any]:
    """Mean areas [L, K] over the oracle's: means come before the ratio, where little future is left."""
    return {name: np.asarray(x) / np.asarray(areas["oracle"]) for name, x in areas.items()}


def as_json(costs: Costs) -> dict[str, Any]:
    """Means over sequences by kind, and each sequence's mean over agents."""
    kinds = list(dict.fromkeys(batches.kind(task) for task in costs.tasks))
    by_kind = {}
    for kind in kinds:
        own = costs.of([kind])
        by_kind[kind] = {
            "sequences": len(own.tasks),
            "areas": {name: x.mean(axis=0) for name, x in own.areas.items()},
            "curves": {name: x.mean(axis=(0, 2)) for name, x in own.curves.items()},
        }
    each = {name: x.mean(axis=(1, 2)) for name, x in costs.areas.items()}
    tree = {"shares": SHARES, "attention_free": FREE, "kinds": by_kind}
    return tree | {"tasks": list(costs.tasks), "each": each}
