"""Scissorhands: tokens that the last queries attended to often will be attended to again.

Liu et al., Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression
at Test Time, https://arxiv.org/abs/2305.17118
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
"""Queries looked at together: attention rows of the whole history are never held at once."""

SLACK = 1e-5
"""Attention this much below the mean, relatively, still counts: rounding must not decide among equals."""


@dataclasses.dataclass(frozen=True, repr=False)
class Scissorhands(Eviction):
    """Score = how many of the last ``window`` queries gave the token at least the mean of their attention.

    A query that sees n tokens gives 1 / n in the mean; a token is not counted by queries before it. Counts
    are added over a group's heads and tie often: equal counts keep the lowest positions.

    A prompt only: each query has a threshold of its own, where reads tell sums over queries, and a window
    that slides with every step would want ``window`` bits a slot.

    Attributes:
      window: queries of the history (fewer in shorter rows).
      recent: newest tokens that are protected.

    Raises:
      PolicyError: window < 1, recent < 0.
    """

    name = "scissorhands"
    arguments = {
        "window": Whole(1),
        "recent": Whole(),
    }
    needs = frozenset({"q", "k"})
    scores_prompt = True
    window: int = 400
    recent: int = 10

    @property
    def protects(self) -> int:
        """``recent``."""
        return self.recent

    def score_prompt(self, params: Params | None, observed: Observation) -> Float[Array, "B K T"]:
        """Counts, block by block of queries."""
        steps = -(-min(self.window, observed.k.shape[2]) // BLOCK)
        first = observed.total - self.window

        def count(counts: Float[Array, "B K T"], step: Int[Array, ""]) -> tuple[Array, None]:
            # Blocks are counted back from the last token; what is before the history counts nothing.
            at = observed.total[:, None] - 1 - step * BLOCK - jnp.arange(BLOCK)[None, :]
            at = jnp.where(at >= jnp.maximum(first, 0)[:, None], at, -1)
            return counts + _above_mean(observed, at), None

        start = jnp.zeros(observed.k.shape[:3], jnp.float32)
        return jax.lax.scan(count, start, jnp.arange(steps))[0]


def _above_mean(observed: Observation, at: Int[Array, "B I"]) -> Float[Array, "B K T"]:
    """How many (query, head) pairs, of queries at positions ``at`` (negative: none), look at each token."""
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
