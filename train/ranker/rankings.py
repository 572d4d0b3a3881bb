"""Random rankings, what they cost, and how a policy learns from them (Moschella et al., arXiv 2602.10238).

A ranking is an array of token indices, the best first. Tokens that are not candidates come last and count for
nothing. Letters: ... any leading axes, X rankings drawn, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

BEHIND = -1e30
"""Score of tokens that are not candidates; finite, so that no gradient is NaN."""


def best(score: Float[Array, "... T"], candidates: Bool[Array, "... T"]) -> Int[Array, "... T"]:
    """The ranking by falling score, ties to the lowest index."""
    return jnp.argsort(-jnp.where(candidates, score, BEHIND), axis=-1, stable=True)


def drawn(
    key: Array, score: Float[Array, "... T"], candidates: Bool[Array, "... T"], count: int
) -> Int[Array, "X ... T"]:
    """Rankings of the Plackett-Luce model with these log-weights: sorted by score plus Gumbel noise."""
    noise = jax.random.gumbel(key, (count, *score.shape))
    return best(score + noise, candidates)


def log_probability(
    score: Float[Array, "... T"], candidates: Bool[Array, "... T"], ranking: Int[Array, "... T"]
) -> Float[Array, ...]:
    """log pi = sum over ranks i of score_i - logsumexp of the scores from rank i on."""
    ranked = _in_order(jnp.where(candidates, score, BEHIND), ranking)
    is_candidate = _in_order(candidates, ranking)
    later = jax.lax.cumlogsumexp(ranked, axis=ranked.ndim - 1, reverse=True)
    return jnp.where(is_candidate, ranked - later, 0.0).sum(axis=-1)


def cost(
    importance: Float[Array, "... T"], ranking: Int[Array, "... T"], budget: Float[Array, ...] | None = None
) -> Float[Array, ...]:
    """Importance that is evicted, summed over all budgets from 1 token on: sum of (rank - 1) importance.

    Args:
      importance: 0 for tokens that are not candidates.
      ranking: the best first.
      budget: in tokens; then only what this budget evicts counts.
    """
    ranked = _in_order(importance, ranking)
    rank = jnp.arange(ranked.shape[-1], dtype=ranked.dtype)
    weight = rank if budget is None else (rank >= budget[..., None]).astype(ranked.dtype)
    return (ranked * weight).sum(axis=-1)


def area(
    importance: Float[Array, "... T"], ranking: Int[Array, "... T"], candidates: Int[Array, ...]
) -> Float[Array, ...]:
    """``cost`` as the share of all importance that the mean budget evicts; 1/2 in expectation at random.

    Args:
      importance, ranking: as in ``cost``.
      candidates: number of ranked tokens. With only one, or without any importance, the area is 1/2, too.
    """
    most = importance.sum(axis=-1) * (candidates - 1)
    return jnp.where(most > 0, cost(importance, ranking) / jnp.where(most > 0, most, 1.0), 0.5)


def _in_order(x: Array, ranking: Int[Array, "... T"]) -> Array:
    return jnp.take_along_axis(jnp.broadcast_to(x, ranking.shape), ranking, axis=-1)


def ratio(cost: Float[Array, ...], least: Float[Array, ...]) -> Float[Array, ...]:
    """Cost divided by the optimal ranking's; 1 if that costs nothing, so that nothing is learned."""
    return jnp.where(least > 0, cost / jnp.where(least > 0, least, 1.0), 1.0)


def advantage(reward: Float[Array, "X ..."], normalise: bool = True) -> Float[Array, "X ..."]:
    """Reward minus the mean of the others (RLOO), divided by its standard deviation unless that is 0."""
    count = reward.shape[0]
    centred = (reward - reward.mean(axis=0)) * (count / (count - 1))
    if not normalise:
        return centred
    spread = centred.std(axis=0)
    differs = spread > 1e-7
    return jnp.where(differs, centred / jnp.where(differs, spread, 1.0), 0.0)


def soft_rank(
    score: Float[Array, "... T"], candidates: Bool[Array, "... T"], temperature: float
) -> Float[Array, "... T"]:
    """Differentiable ranks from 0: the candidates before a token, each counted by a sigmoid of its lead."""
    lead = (score[..., None, :] - score[..., :, None]) / temperature
    before = jnp.where(candidates[..., None, :], jax.nn.sigmoid(lead), 0.0)
    return before.sum(axis=-1) - 0.5  # its own half


def projected_rank(
    score: Float[Array, "... T"], candidates: Bool[Array, "... T"], temperature: float
) -> Float[Array, "... T"]:
    """Differentiable ranks from 0: -score / temperature projected onto the permutations' convex hull (L2).

    Blondel et al., Fast Differentiable Sorting and Ranking, https://arxiv.org/abs/2002.08871. With z in
    falling order s, and the ranks in falling order w, the projection is z less the decreasing regression of
    s - w in the order of z. The regression's derivative is a mean over each of its blocks. Tokens that are no
    candidates get any number.
    """
    *lead, t = score.shape
    z = jnp.where(candidates, -score / temperature, 0.0)
    order = jnp.argsort(jnp.where(candidates, -z, jnp.inf), axis=-1, stable=True)
    place, count = jnp.arange(t), candidates.sum(axis=-1, keepdims=True)
    y = jnp.where(place < count, jnp.take_along_axis(z, order, axis=-1) - (count - 1 - place), BEHIND)
    flat = y.reshape(-1, t)
    blocks = jax.vmap(_blocks)(jax.lax.stop_gradient(flat))
    mean = jax.vmap(lambda y, block: _means(y, block)[block])(flat, blocks).reshape(*lead, t)
    return z - jnp.take_along_axis(mean, jnp.argsort(order, axis=-1), axis=-1)


def _means(y: Float[Array, " T"], block: Int[Array, " T"]) -> Float[Array, " T"]:
    """Mean of each block, by its number."""
    add = lambda x: jax.ops.segment_sum(x, block, num_segments=len(y))  # noqa: E731
    return add(y) / jnp.maximum(add(jnp.ones_like(y)), 1)


def _blocks(y: Float[Array, " T"]) -> Int[Array, " T"]:
    """The block of each number in the decreasing regression of ``y``: pool adjacent violators."""

    def push(i: Array, stack: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        means, counts, top = stack
        stack = means.at[top].set(y[i]), counts.at[top].set(1), top + 1

        def rises(stack: tuple[Array, Array, Array]) -> Array:
            means, _, top = stack
            return (top > 1) & (means[top - 2] < means[top - 1])

        def merged(stack: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            means, counts, top = stack
            total = counts[top - 2] + counts[top - 1]
            mean = means[top - 2] + (means[top - 1] - means[top - 2]) * (counts[top - 1] / total)
            return means.at[top - 2].set(mean), counts.at[top - 2].set(total), top - 1

        return jax.lax.while_loop(rises, merged, stack)

    start = jnp.zeros_like(y), jnp.zeros(y.shape, jnp.int32), jnp.asarray(0)
    _, counts, top = jax.lax.fori_loop(0, len(y), push, start)
    ends = jnp.where(jnp.arange(len(y)) < top, jnp.cumsum(counts), len(y) + 1)
    return jnp.searchsorted(ends, jnp.arange(len(y)), side="right")


def true_rank(importance: Float[Array, "... T"], candidates: Bool[Array, "... T"]) -> Int[Array, "... T"]:
    """The rank of each token in the optimal ranking."""
    return jnp.argsort(best(importance, candidates), axis=-1, stable=True)
