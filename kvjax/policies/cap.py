"""CapKV: keeps the values that span most, weighted by how much their keys resemble the prompt's mean query.

Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective, https://arxiv.org/abs/2604.25975
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import FIRST, Eviction, Number, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float

EXACT = jax.lax.Precision.HIGHEST

LEAST = 1e-6
"""Added to a weight inside the matrix."""


@dataclasses.dataclass(frozen=True, repr=False)
class Cap(Eviction):
    """Score = w v' A^-1 v with A = I + sum of w v v' over the prompt: what log det A gains by the token.

    The weight is w = exp(tau (c - max c)), where c is the cosine between key and anchor. A query head's
    anchor is its mean query before RoPE, rotated by the mean of the model's rotations over the ``ahead``
    positions after the prompt. The paper takes the product of key and anchor; kvpress, by its authors, the
    cosine. Scores are averaged over a group's heads. The first ``sinks`` tokens are left out of all sums and
    go when no other token is left.

    Attributes:
      tau: how sharply weights follow the cosine.
      ahead: future positions whose rotations are averaged.
      sinks: first tokens.
    """

    name = "cap"
    arguments = {
        "tau": Number(0, 80, "factor"),
        "ahead": Whole(1, "number of positions", 4096, by_positions=True),
        "sinks": Whole(),
    }
    traced = ("tau", "sinks")
    needs = frozenset({"q_pre", "k", "v"})
    scores_prompt = True
    tau: float = 5.0
    ahead: int = 512
    sinks: int = 4

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        judged = (observed.pos >= self.sinks)[:, None, :]
        q, k, v = (
            jnp.where(judged[..., None], x.astype(jnp.float32), 0.0)
            for x in (observed.q_pre, observed.k, observed.v)
        )
        rows, heads, _, h = k.shape
        anchor = q.sum(axis=2)  # as long as the mean is not needed: only its direction counts
        rotation = observed.rotation_ahead(self.ahead, h)
        if rotation is not None:
            anchor = jnp.einsum("bnh,bhi->bni", anchor, rotation, precision=EXACT)
        anchor = _unit(anchor).reshape(rows, heads, -1, h)
        cosine = jnp.einsum("bkgh,bkth->bkgt", anchor, _unit(k), precision=EXACT)
        cosine = jnp.where(judged[:, :, None], cosine, -jnp.inf)
        highest = cosine.max(axis=-1, keepdims=True, initial=-1.0)
        weight = jnp.where(judged[:, :, None], jnp.exp(self.tau * (cosine - highest)), 0.0)
        score = (weight * _leverage(v, weight)).mean(axis=2)
        return jnp.where(judged, score, FIRST)


def _leverage(v: Float[Array, "B K T H"], weight: Float[Array, "B K G T"]) -> Float[Array, "B K G T"]:
    """v' A^-1 v of each query head's A."""
    scaled = v[:, :, None] * jnp.sqrt(weight + LEAST)[..., None]
    a = jnp.eye(v.shape[-1]) + jnp.einsum("bkgth,bkgti->bkghi", scaled, scaled, precision=EXACT)
    columns = jnp.broadcast_to(jnp.swapaxes(v, 2, 3)[:, :, None], (*a.shape[:-1], v.shape[2]))
    return (columns * jnp.linalg.solve(a, columns)).sum(axis=-2)


def _unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Scaled to length one; 0 stays 0."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


PRESETS = {"cap": "cap + uniform(0.25)"}

EXAMPLES = (Policy(eviction=Cap(ahead=16, sinks=2), budget=Uniform(24)),)
