"""Scissorhands: keeps the tokens that the last queries attended to most often.

Liu et al., Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at
Test Time, https://arxiv.org/abs/2305.17118
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.algebra import Eviction, Observation, Policy, Whole
from kvjax.budgets.uniform import Uniform
from kvjax.types import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

BLOCK = 16
"""Queries handled together, so that attention rows of the whole history are never in memory at once."""

SLACK = 1e-5
"""Attention below the mean by this relative amount still counts: rounding must not decide among equals."""


@dataclasses.dataclass(frozen=True, repr=False)
class Scissorhands(Eviction):
    """Score = how many of the last ``window`` queries gave the token at least the mean of their attention.

    A query that sees n tokens gives 1 / n in the mean; a query does not count tokens after it. Counts are
    added over a group's heads and tie often: equal counts keep the lowest positions.

    For prompts only: each query has a threshold of its own, but reads return sums over queries; and a window
    that slides with every step would need ``window`` bits per slot.

    Attributes:
      window: queries of the history (fewer in shorter rows).
      recent: newest tokens that are protected.
    """

    name = "scissorhands"
    arguments = {"window": Whole(1, by_positions=True), "recent": Whole()}
    needs = frozenset({"q", "k"})
    scores_prompt = True
    window: int = 400
    recent: int = 10

    @property
    def protects(self) -> int:
        return self.recent

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        steps = -(-min(self.window, observed.k.shape[2]) // BLOCK)
        first = observed.total - self.window

        def count(counts: Float[Array, "B K T"], step: Int[Array, ""]) -> tuple[Array, None]:
            # Blocks are counted back from the last token; queries before the history do not count.
            at = observed.total[:, None] - 1 - step * BLOCK - jnp.arange(BLOCK)[None, :]
            at = jnp.where(at >= jnp.maximum(first, 0)[:, None], at, -1)
            return counts + _above_mean(observed, at), None

        start = jnp.zeros(observed.k.shape[:3], jnp.float32)
        return jax.lax.scan(count, start, jnp.arange(steps))[0]


def _above_mean(observed: Observation, at: Int[Array, "B I"]) -> Float[Array, "B K T"]:
    """How many (query, head) pairs attend to each token, for queries at positions ``at`` (negative: none)."""
    rows, heads, t, h = observed.k.shape
    q = jnp.take_along_axis(observed.q, jnp.maximum(at, 0)[:, None, :, None], axis=2)
    q = q.reshape(rows, heads, -1, at.shape[1], h)
    s = jnp.einsum(
        "bkgih,bkth->bkgit",
        q,
        observed.k,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    sees = (observed.pos[:, None, :] >= 0) & (observed.pos[:, None, :] <= at[:, :, None])  # [B, I, T]
    s = s * h**-0.5
    s = s if observed.softcap is None else observed.softcap * jnp.tanh(s / observed.softcap)
    s = jnp.where(sees[:, None, None], s, -jnp.inf)
    mean = (
        jax.nn.logsumexp(s, axis=-1, keepdims=True)
        - jnp.log(jnp.maximum(at + 1.0, 1.0))[:, None, None, :, None]
    )
    high = (s >= mean - SLACK) & sees[:, None, None]
    return high.astype(jnp.float32).sum(axis=(2, 3))


PRESETS = {"scissorhands": "scissorhands + uniform(0.25)"}

EXAMPLES = (Policy(eviction=Scissorhands(window=20, recent=4), budget=Uniform(24)),)
