"""What agents are trained for, and what a check measures, on a batch of traces.

Agents lie along one axis, A = L x K, whatever layer they belong to: one program for all, and a mesh cuts that
axis without any communication, as each agent has a loss, a gradient and a clip of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.policies import kvp
from kvjax.types import Params
from train.ranker import baselines, rankings
from train.ranker.settings import Agent, Method

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

Statistics = dict[str, dict[str, Any]]
"""By input leaf: ``mean`` and ``scale`` [A, H or 1] of the training traces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is static.

    Attributes:
      agent, method: see there.
      softcap: of the model's scores, or None.
    """

    agent: Agent
    method: Method
    softcap: float | None = None


def folded(params: Params, statistics: Statistics) -> Params:
    """Agents on raw inputs that compute what ``params`` do on inputs of zero mean and unit variance."""
    found = dict(params)
    for name, of in statistics.items():
        weight = params[name] / of["scale"][:, :, None]
        found[name] = weight
        shift = jnp.einsum("ai,aif->af", of["mean"], weight, precision=jax.lax.Precision.HIGHEST)
        found["b1"] = found["b1"] - shift
    return found


def scores(params: Params, statistics: Statistics, batch: dict[str, Array]) -> Float[Array, "B A T"]:
    """The agents' scores of a batch's tokens, by the function that serves."""
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
    """Tokens that are ranked: of the first ``size`` all but the protected."""
    at, size = jnp.arange(batch["v"].shape[2]), batch["size"][:, None, None]
    return (at >= agent.sinks) & (at < size - agent.recent)


def ranked(task: Task, batch: dict[str, Array]) -> tuple[Float[Array, "B A T"], Bool[Array, "B A T"]]:
    """Importance, 0 for what is not ranked, and what is."""
    worth = jax.lax.stop_gradient(importance(batch, task.softcap))
    may = jnp.broadcast_to(candidates(task.agent, batch), worth.shape)
    return jnp.where(may, worth, 0.0), may


def objective(
    task: Task, statistics: Statistics, params: Params, batch: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The sum of all agents' losses, and means over agents.

    Metrics: ``cost`` of drawn rankings and ``greedy`` of the ranking by score, both over the optimal one's;
    ``spread``, the standard deviation of the rewards of a draw; ``silent``, the share of agents that had
    nothing to learn.
    """
    worth, may = ranked(task, batch)
    score = scores(params, statistics, batch)
    fixed = jax.lax.stop_gradient(score)
    least = rankings.cost(worth, rankings.best(worth, may))
    greedy = rankings.ratio(rankings.cost(worth, rankings.best(fixed, may)), least)
    found = {"greedy": greedy.mean()}
    if task.method.kind == "soft_rank":
        number = jnp.maximum(may.sum(axis=-1, keepdims=True), 1)
        place = rankings.soft_rank(score, may, task.method.temperature)
        off = jnp.where(may, (place - rankings.true_rank(worth, may)) / number, 0.0)
        error = (off**2).sum(axis=-1) / number[..., 0]
        return error.mean(axis=0).sum(), found | {"error": error.mean()}
    orders = rankings.drawn(_key(batch), fixed, may, task.method.permutations)
    paid = rankings.ratio(rankings.cost(worth, orders), least)
    reward = -paid if task.method.budget is None else -_at_one_budget(task.method.budget, worth, may, orders)
    gain = rankings.advantage(reward, task.method.normalise)
    log_pi = rankings.log_probability(score[None], may[None], orders)
    loss = -(gain * log_pi).mean(axis=0)
    found |= {"cost": paid.mean(), "spread": reward.std(axis=0).mean()}
    return loss.mean(axis=0).sum(), found | {"silent": (gain == 0).all(axis=0).mean()}


def _at_one_budget(
    share: float, worth: Float[Array, "B A T"], may: Bool[Array, "B A T"], orders: Array
) -> Float[Array, "X B A"]:
    """Cost of rankings at a budget of that share of the candidates, over the optimal one's."""
    budget = jnp.floor(share * may.sum(axis=-1) + 0.5)
    least = rankings.cost(worth, rankings.best(worth, may), budget)
    return rankings.ratio(rankings.cost(worth, orders, budget[None]), least)


def _key(batch: dict[str, Array]) -> Array:
    return jax.random.fold_in(jax.random.key(0), batch["seed"])


def orders(
    task: Task, layers: int, given: dict[str, Float[Array, "B A T"]], batch: dict[str, Array]
) -> tuple[Float[Array, "B A T"], Float[Array, "B A"], dict[str, Int[Array, "B A T"]]]:
    """What is ranked and how: importance, number of candidates, and rankings by name.

    Rankings are those of the scores ``given``, of ``baselines``, and the "oracle" by importance itself.
    """
    worth, may = ranked(task, batch)
    scored = given | baselines.scores(batch, layers, task.softcap) | {"oracle": worth}
    return worth, may.sum(axis=-1), {name: rankings.best(score, may) for name, score in scored.items()}


def areas(
    task: Task, layers: int, statistics: Statistics, params: Params, batch: dict[str, Array]
) -> dict[str, Float[Array, "B A"]]:
    """``rankings.area`` of each agent ("learned"), of ``baselines``, "random" and "oracle"."""
    worth, count, found = orders(task, layers, {"learned": scores(params, statistics, batch)}, batch)
    paid = {name: rankings.area(worth, order, count) for name, order in found.items()}
    return paid | {"random": jnp.full(count.shape, 0.5)}  # its expectation
