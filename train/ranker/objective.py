"""The agents' objective and the metrics of checks, on a batch of traces.

The agents of all layers lie along one axis, A = L x K: one program for all. A mesh shards that axis without
communication, because every agent has its own loss, gradient and clip.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.policies import kvp
from kvjax.types import Params
from train.ranker import baselines, rankings
from train.ranker.settings import Agent, Method, Settings

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Statistics = dict[str, dict[str, Any]]
"""By input leaf: ``mean`` and ``scale`` [A, H or 1] of the training traces."""


SURROGATES = {"soft_rank": rankings.soft_rank, "projected_rank": rankings.projected_rank}
"""Supervised learning of ranks: pairwise sigmoids, or Blondel's projection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The static arguments of the objective; ``softcap`` is that of the model's scores."""

    agent: Agent
    method: Method
    softcap: float | None = None


def initial_agents(settings: Settings, agents: int, head_dim: int) -> Params:
    """Untrained agents, leaves [A, ...]."""
    agent, key = settings.agent, jax.random.key(settings.seed)
    layers = kvp.initial(
        key, agents, head_dim, 1, inputs=agent.inputs, hidden=agent.hidden, layers=agent.layers
    )
    return layers[0]


def folded(params: Params, statistics: Statistics) -> Params:
    """Agents on raw inputs that compute what ``params`` do on inputs of zero mean and unit variance."""
    raw = dict(params)
    for name, moments in statistics.items():
        weight = params[name] / moments["scale"][:, :, None]
        raw[name] = weight
        shift = jnp.einsum("ai,aif->af", moments["mean"], weight, precision=jax.lax.Precision.HIGHEST)
        raw["b1"] = raw["b1"] - shift
    return raw


def scores(params: Params, statistics: Statistics, batch: dict[str, Array]) -> Float[Array, "B A T"]:
    """The agents' scores of a batch's tokens, by the function that serving uses."""
    tokens = batch["v"].shape[2]
    pos = jnp.broadcast_to(jnp.arange(tokens), (batch["v"].shape[0], tokens))
    return kvp.scores(folded(params, statistics), batch["k"], batch.get("k_pre"), batch["v"], pos)


def importance(batch: dict[str, Array], softcap: float | None) -> Float[Array, "B A T"]:
    """Attention of the future queries, each the maximum over its group, summed; softmax over all keys so far.

    Args:
      batch: ``q`` [B, A, G, F, H] at positions ``at`` [B, F], EMPTY where there is none; ``k`` [B, A, T, H].
      softcap: of the model's scores.
    """
    q, k = (batch[name].astype(jnp.float32) for name in ("q", "k"))
    s = jnp.einsum("bagfh,bath->bagft", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    at = batch["at"][:, None, None, :, None]
    weight = jax.nn.softmax(jnp.where(jnp.arange(k.shape[2]) <= jnp.maximum(at, 0), s, -jnp.inf), axis=-1)
    return jnp.where(at >= 0, weight, 0.0).max(axis=2).sum(axis=2)


def candidates(agent: Agent, batch: dict[str, Array]) -> Bool[Array, "B 1 T"]:
    """The tokens that are ranked: the first ``size`` without the protected ones."""
    at, size = jnp.arange(batch["v"].shape[2]), batch["size"][:, None, None]
    return (at >= agent.sinks) & (at < size - agent.recent)


def ranked(task: Task, batch: dict[str, Array]) -> tuple[Float[Array, "B A T"], Bool[Array, "B A T"]]:
    """Importance, 0 for tokens that are not ranked, and which tokens are."""
    weight = jax.lax.stop_gradient(importance(batch, task.softcap))
    is_ranked = jnp.broadcast_to(candidates(task.agent, batch), weight.shape)
    return jnp.where(is_ranked, weight, 0.0), is_ranked


def objective(
    task: Task, statistics: Statistics, params: Params, batch: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The sum of all agents' losses, and means over agents.

    Metrics: ``cost`` of drawn rankings and ``greedy`` of the ranking by score, both divided by the optimal
    one's; ``spread``, the standard deviation of the rewards of a draw; ``silent``, the share of agents
    without a gradient.
    """
    method = task.method
    weight, is_ranked = ranked(task, batch)
    score = scores(params, statistics, batch)
    fixed = jax.lax.stop_gradient(score)
    least = rankings.cost(weight, rankings.best(weight, is_ranked))
    greedy = rankings.ratio(rankings.cost(weight, rankings.best(fixed, is_ranked)), least)
    metrics = {"greedy": greedy.mean()}
    if method.kind in SURROGATES:
        number = jnp.maximum(is_ranked.sum(axis=-1, keepdims=True), 1)
        rank = SURROGATES[method.kind](score, is_ranked, method.temperature)
        off = jnp.where(is_ranked, (rank - rankings.true_rank(weight, is_ranked)) / number, 0.0)
        error = (off**2).sum(axis=-1) / number[..., 0]
        return error.mean(axis=0).sum(), metrics | {"error": error.mean()}
    key = jax.random.fold_in(jax.random.key(0), batch["seed"])
    orders = rankings.drawn(key, fixed, is_ranked, method.permutations)
    cost = rankings.ratio(rankings.cost(weight, orders), least)
    reward = -cost if method.budget is None else -_at_one_budget(method.budget, weight, is_ranked, orders)
    advantage = rankings.advantage(reward, method.normalise)
    log_pi = rankings.log_probability(score[None], is_ranked[None], orders)
    loss = -(advantage * log_pi).mean(axis=0)
    metrics |= {"cost": cost.mean(), "spread": reward.std(axis=0).mean()}
    return loss.mean(axis=0).sum(), metrics | {"silent": (advantage == 0).all(axis=0).mean()}


def _at_one_budget(
    share: float, weight: Float[Array, "B A T"], is_ranked: Bool[Array, "B A T"], orders: Array
) -> Float[Array, "X B A"]:
    """Cost of rankings at a budget of that share of the candidates, divided by the optimal one's."""
    budget = jnp.floor(share * is_ranked.sum(axis=-1) + 0.5)
    least = rankings.cost(weight, rankings.best(weight, is_ranked), budget)
    return rankings.ratio(rankings.cost(weight, orders, budget[None]), least)


def orders(
    task: Task, layers: int, score_of: dict[str, Float[Array, "B A T"]], batch: dict[str, Array]
) -> tuple[Float[Array, "B A T"], Float[Array, "B A"], dict[str, Int[Array, "B A T"]]]:
    """(importance, number of candidates, rankings by name).

    Rankings are by the scores ``score_of``, by those of ``baselines``, and by importance itself ("oracle").
    """
    weight, is_ranked = ranked(task, batch)
    named = score_of | baselines.scores(batch, layers, task.softcap) | {"oracle": weight}
    rankings_of = {name: rankings.best(score, is_ranked) for name, score in named.items()}
    return weight, is_ranked.sum(axis=-1), rankings_of


def areas(
    task: Task, layers: int, statistics: Statistics, params: Params, batch: dict[str, Array]
) -> dict[str, Float[Array, "B A"]]:
    """``rankings.area`` of each agent ("learned"), of ``baselines``, "random" and "oracle"."""
    weight, count, order_of = orders(task, layers, {"learned": scores(params, statistics, batch)}, batch)
    area_of = {name: rankings.area(weight, order, count) for name, order in order_of.items()}
    return area_of | {"random": jnp.full(count.shape, 0.5)}  # its expectation
